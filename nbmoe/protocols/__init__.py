"""How arrays of other libraries are recognized, described and allocated.

None of these modules imports the library whose arrays it knows: an array of it is proof that the
caller already has.
"""
