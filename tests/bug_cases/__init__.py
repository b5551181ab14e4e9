"""Public bug reports about quantized MoE kernels, each as the smallest input that shows it.

Every test names the reports that it stands for, as owner/repository#number. Reports about reading
checkpoints are tests in `tests.checkpoints`: missing, zero and denormal scales
(vllm-project/vllm#54189, #45212, #42601) and gate and up with different weight scales (#54974) in
test_checkpoint_bad_scales; a divisor read as a factor (modular/modular#6600,
huggingface/transformers#48371, #48372) in test_checkpoint_dequantize; e8m0 bytes cast instead of
viewed (vllm-project/vllm#51946, #43416), gate and up interleaved or one after the other
(vllm-project/vllm#44893, #52240) in test_checkpoint_families.
"""
