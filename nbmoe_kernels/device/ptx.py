"""Makes the op table callable from numba-cuda: a typing rule and inline PTX for every op.

LLVM constraints follow from the op's signature, so no op writes them. Every op but the pure ones is
volatile and clobbers memory. Collectives and ordering ops are also `convergent`: LLVM may not make
them depend on more control flow than the source does, but may unroll loops around them.
"""

from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.typing.templates import infer, infer_global, make_intrinsic_template

from nbmoe_kernels.device import op as table
from nbmoe_kernels.device.effects import GridWait, NamedBarrier
from nbmoe_kernels.device.unroll import register_unroll

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_CONSTRAINT = {"u16": "h", "u32": "r", "i32": "r", "u64": "l", "i64": "l", "f32": "f", "f64": "d"}
NUMBA_TYPES = {
    "u8": types.uint8,
    "u16": types.uint16,
    "u32": types.uint32,
    "u64": types.uint64,
    "i32": types.int32,
    "i64": types.int64,
    "f32": types.float32,
    "f64": types.float64,
}
_LLVM = {
    "u8": ir.IntType(8),
    "u16": ir.IntType(16),
    "u32": _I32,
    "i32": _I32,
    "u64": _I64,
    "i64": _I64,
    "f32": ir.FloatType(),
    "f64": ir.DoubleType(),
}
_ADDRESS_SPACE = {"global": 1, "shared": 3}


def _address(ctx: Any, builder: Any, array_type: Any, array: Any, index: Any, space: str) -> Any:
    """Address of ``array[index]`` in its own address space: 32 bits if shared, else 64."""
    if isinstance(array_type, types.CPointer):
        data = array
    else:
        data = ctx.make_array(array_type)(ctx, builder, array).data
    element = builder.gep(data, [index])
    pointer = ir.PointerType(element.type.pointee, _ADDRESS_SPACE[space])
    return builder.ptrtoint(
        builder.addrspacecast(element, pointer), _I32 if space == "shared" else _I64
    )


class _Operands:
    """Inputs, outputs, constraints and operand names of one asm statement."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []
        self.inputs: list[Any] = []
        self.constraints: list[str] = []
        self.names: dict[str, str] = {}

    def add_output(self, name: str, dtype: str, count: int) -> None:
        first = len(self.outputs)
        self.outputs += [_LLVM[dtype]] * max(count, 1)
        self.constraints += ["=" + _CONSTRAINT[dtype]] * max(count, 1)
        if count:
            registers = [f"${first + i}" for i in range(count)]
            self.names[name] = "{" + ", ".join(registers) + "}"
            self.names |= {f"{name}[{i}]": register for i, register in enumerate(registers)}
        else:
            self.names[name] = f"${first}"

    def add_input(self, name: str, value: Any, constraint: str) -> None:
        self.names[name] = f"${len(self.constraints)}"
        self.inputs.append(value)
        self.constraints.append(constraint)

    def tie_inputs(self, values: list[Any]) -> None:
        """Inputs that share the first outputs' registers: a tile updated in place."""
        self.inputs += values
        self.constraints += [str(i) for i in range(len(values))]


def _emit(op: table.Op, ctx: Any, builder: Any, sig: Any, args: tuple[Any, ...]) -> Any:
    operands = _Operands()
    by_name = dict(zip(op.arguments, zip(sig.args, args, strict=True), strict=True))
    tile = next((p for p in op.params if p.kind == "tile"), None)
    slots: list[Any] = []
    if tile:
        array_type, array = by_name[tile.name]
        data = ctx.make_array(array_type)(ctx, builder, array).data
        slots = [builder.gep(data, [ir.Constant(_I64, i)]) for i in range(tile.length)]
        operands.add_output(tile.name, tile.dtype, tile.length)
        operands.tie_inputs([builder.load(slot) for slot in slots])
    elif op.result:
        operands.add_output("ret", *op.result)
    for p in op.params:
        if p.kind == "scalar":
            operands.add_input(p.name, by_name[p.name][1], _CONSTRAINT[p.dtype])
        elif p.is_pointer:
            array_type, array = by_name[p.name]
            index = by_name[f"{p.name}_index"][1]
            address = _address(ctx, builder, array_type, array, index, p.kind)
            operands.add_input(p.name, address, "r" if p.kind == "shared" else "l")
    if not op.is_pure:
        operands.constraints.append("~{memory}")
    text = op.ptx
    for name, value in operands.names.items():
        text = text.replace(f"<{name}>", value)
    outputs = operands.outputs
    if not outputs:
        result_type: Any = ir.VoidType()
    elif len(outputs) == 1:
        result_type = outputs[0]
    else:
        result_type = ir.LiteralStructType(outputs)
    asm = ir.InlineAsm(
        ir.FunctionType(result_type, [v.type for v in operands.inputs]),
        text,
        ",".join(operands.constraints),
        side_effect=not op.is_pure,
    )
    meets = any(isinstance(effect, NamedBarrier | GridWait) for effect in op.effects or ())
    collective = op.scope is not table.Scope.THREAD or op.effects == () or meets
    attributes = ("convergent", "nounwind") if collective else ("nounwind",)
    result = builder.call(asm, operands.inputs, attrs=attributes)
    if slots:
        for i, slot in enumerate(slots):
            builder.store(builder.extract_value(result, i) if len(slots) > 1 else result, slot)
    if op.result is None:
        return ctx.get_dummy_value()
    if not op.result[1]:
        return result
    values = ir.Constant(ir.ArrayType(outputs[0], len(outputs)), ir.Undefined)
    for i in range(len(outputs)):
        values = builder.insert_value(values, builder.extract_value(result, i), i)
    return values


def _signature(op: table.Op, argument_types: tuple[Any, ...]) -> Any:
    given = dict(zip(op.arguments, argument_types, strict=True))
    wanted: list[Any] = []
    for p in op.params:
        if p.kind == "scalar":
            wanted.append(NUMBA_TYPES[p.dtype])
        else:
            array = given[p.name]
            if array.dtype is not NUMBA_TYPES[p.dtype]:
                raise TypeError(f"{op.name}: {p.name} must be an array of {p.dtype}, got {array}")
            wanted.append(array)
            if p.is_pointer:
                wanted.append(types.uint32 if p.kind == "shared" else types.uint64)
    if op.result is None:
        returned: Any = types.void
    elif op.result[1]:
        returned = types.UniTuple(NUMBA_TYPES[op.result[0]], op.result[1])
    else:
        returned = NUMBA_TYPES[op.result[0]]
    return returned(*wanted)


def _register(op: table.Op) -> None:
    def define(typing_context: Any, *argument_types: Any) -> Any:
        def codegen(ctx: Any, builder: Any, sig: Any, args: tuple[Any, ...]) -> Any:
            return _emit(op, ctx, builder, sig, args)

        return _signature(op, argument_types), codegen

    # numba checks calls against this function's own argument names.
    names = "".join(f", {a}" for a in op.arguments)
    namespace: dict[str, Any] = {"define": define}
    exec(f"def definition(context{names}): return define(context{names})", namespace)
    stub = table.STUBS[op.name]
    template = make_intrinsic_template(stub, namespace["definition"], op.name)
    infer(template)
    infer_global(stub, types.Function(template))


_registered: set[str] = set()


def register_ops() -> None:
    """Register every declared op that is not yet known to numba-cuda."""
    if not _registered:
        register_unroll()
    for name, op in table.TABLE.items():
        if name not in _registered:
            _registered.add(name)
            _register(op)


def pointer_type(dtype: str) -> Any:
    """The numba type of a kernel's pointer parameter."""
    return types.CPointer(NUMBA_TYPES[dtype])
