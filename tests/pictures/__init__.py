"""Pictures of docs, drawn from runs of the emulator: python -m tests.pictures.mega_ffn_timeline."""
