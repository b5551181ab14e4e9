"""What ops do on a GPU, recorded by `record`, to compare their twins with."""
