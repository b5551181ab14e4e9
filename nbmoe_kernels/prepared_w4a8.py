"""MXFP4 weights folded into e4m3: what lies where in a unit of 64 rows by a 128-block of K.

A code c of a block with the power 2^k relative to its row, k from -8 to 6, is the e4m3 number
c * 2^k exactly. A unit has 2 planes of 128 x 16 bytes of codes, then 8 bytes for each 4 threads.
With i = 32 w + 4 g + t a warpgroup's thread and j a step of 32 elements of K:

    word 2 (j % 2) + r of thread i of plane j / 2: the row r (0: g, 1: g + 8) of the 16 of warp w
        nibble n (0 to 7) has the magnitude of element 32 j + 16 (n / 4) + 4 t + n % 4 in 3 bits;
        bit 3 of nibble 2 m + h is the sign of element 32 j + 16 h + 4 t + m
    byte 2 j + r of threads i / 4: k + 8 of the row's block j, 15 where the scale is NaN; 128 more
        below 3, where a code's product is subnormal, and with NaN
"""

CODE_BYTES = 4096
UNIT_BYTES = CODE_BYTES + 256
POWER_BIAS = 8
LARGEST_POWER = 6
NAN_POWER = 15
UNUSUAL = 0x80
LEAST_USUAL = 3
"""2^-5: half of it is the smallest normal e4m3."""
