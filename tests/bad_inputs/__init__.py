"""Bad inputs: each gets a typed error that names it, before any launch, with outputs untouched.

`valid` has one valid call of every operation and format, `common` and `common_out` spoil each of
its arrays in each way that arrays can be bad (rows C), and the tables of `test_bad_*` spoil what an
operation has of its own. A case's id begins with the row that it proves:

    C any array        G rows of experts    M matmul               L preparing weights
    Q quantize         S activation         W matmul with swiglu   R routing, combination
    K strategies, backends                  F the whole FFN

Rows that have no test here, and why:

| row | why |
|---|---|
| Q13, Q14 | NaN and infinity in an input are data: they stay in their block (`test_legal`). |
| G8 of MX, row-scaled and activation | No operand is by expert id, so no id is too large. |
| G11 | The rows of a masked slot are legal and get zeros (`test_legal`). |
| G27, W13 | `tests/ops/test_strategy_fp8.py`. |
| S12 of operations | They take inverses; the strategy, which inverts, warns. |
| S16 | Statistics on a GPU are accepted and not read. |
| S17, W1, W2 | An array does not say whether its rows are interleaved. |
| M19 | A wrong hint is legal (`test_legal`) and changes no byte. |
| M22, M23, M25, K7-K10 | No operation takes a tile shape; those that are chosen fit by design. |
| M24 | `tests/ops/test_backend.py`. |
| L2, L3 | Scales are always padded to whole tiles; only empty ones are refused. |
| L5-L7 of checkpoints | `tests/checkpoints/test_checkpoint_bad_scales.py`. |
| L18 | There is one order of nibbles and no option for another. |
| F17 | Nobody chooses the grid of `mega_ffn_nvfp4`: it is what fits on the GPU. |
| F20 | Blocks that are resident together make progress on every GPU that kernels run on. |
| K6 | A call's backend is that of its operands; a host backend captures nothing. |
| K11, K12, K18 | Nothing is configured from files. |
| K14-K17, K19 | `tests/emulator`. |
| K20 | Scratch belongs to the caller, `workspace=`; an operation keeps none. |
"""
