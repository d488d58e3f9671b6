"""PTX text to instructions: one record of integers each, which ``emulator.cpp`` runs.

Only what the kernels use is known. Any other instruction, modifier or directive raises NotImplementedError with its
line: give it a method here and a case in ``emulator.cpp``.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

# enumerations of emulator.cpp, too
OPERATIONS = """
MOV PACK UNPACK LOAD STORE ADD SUB MUL MUL_HI MUL_WIDE MAD DIV REM MIN MAX NEG ABS SQRT RCP AND OR XOR NOT SHL SHR PRMT
POPC CLZ DP2A DP4A SETP SET SELP CVT MAPA ATOM BRANCH EXIT BAR_SYNC BAR_ARRIVE BAR_WARP CLUSTER_ARRIVE CLUSTER_WAIT
SHFL VOTE REDUX ELECT MBAR_INIT MBAR_ARRIVE MBAR_EXPECT MBAR_TRY CP_ASYNC CP_ARRIVE CP_COMMIT CP_WAIT BULK_LOAD TMA_LOAD
TMA_STORE TMA_WAIT ST_ASYNC LDMATRIX STMATRIX MMA WGMMA WGMMA_COMMIT WGMMA_WAIT
""".split()
TYPES = "pred b8 u8 s8 b16 u16 s16 b32 u32 s32 b64 u64 s64 f16 bf16 f32 f16x2 bf16x2 e4m3 e4m3x2".split()
SPECIALS = [
    *(f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"),
    *(f"%{name}.{axis}" for name in ("clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid") for axis in "xyz"),
    *("%laneid", "%warpid", "%cluster_ctarank", "%cluster_nctarank"),
    *(f"%lanemask_{which}" for which in ("eq", "lt", "le", "gt", "ge")),
]
SPACES = ["param", "global", "shared", "generic"]
COMPARISONS = "eq ne lt le gt ge equ neu ltu leu gtu geu".split()
SHUFFLES = ["up", "down", "bfly", "idx"]
VOTES = ["ballot", "any", "all"]
REDUCTIONS = ["add", "min", "max", "or"]
ROUNDINGS = ["rn", "rz", "rm", "rp"]
# bits of a record's flags
RELU, KEEP_NAN, MULTICAST, TRANSPOSED, IN_REGISTERS, A_TRANSPOSED, B_TRANSPOSED = 1, 2, 1, 1, 1, 2, 4
SHARED_WORD = 1

# A record: operands are the `outputs + inputs` places from `first` on in the list of operands, and an operand is a
# register, or a constant -1 - i. `guard` is the register of the predicate, or -1. `mode` depends on the operation.
FIELDS = (
    "operation",
    "type",
    "source",
    "guard",
    "negated",
    "outputs",
    "inputs",
    "first",
    "offset",
    "offset2",
    "mode",
    "flags",
    "target",
    "line",
)

# The first byte that a kernel's shared memory begins at: below is what the hardware keeps for itself.
SHARED_BASE = 1024
# What changes no result here.
_HINTS = set("lo sync aligned uni relaxed release acq_rel gpu cta cg cs tile row col x4 m8n8 read L2::128B".split())
_NO_OPERATION = ("griddepcontrol", "fence", "prefetch", "setmaxnreg")
_SIMPLE = {
    **{name: name.upper() for name in "add sub div rem neg abs and or xor not shl shr popc clz selp".split()},
    "fma": "MAD",
    "prmt": "PRMT",
}


@dataclass
class _Statement:
    """``head.modifiers arguments``; what ``take`` does not take, and is no type and no hint, is not known."""

    text: str
    line: int
    head: str
    modifiers: list[str]
    arguments: list[str]
    types: list[str] = field(default_factory=list)

    def take(self, name: str) -> bool:
        if name in self.modifiers:
            self.modifiers.remove(name)
            return True
        return False

    def one_of(self, names: list[str]) -> int:
        for i, name in enumerate(names):
            if self.take(name):
                return i
        raise self.unknown()

    def unknown(self) -> NotImplementedError:
        return NotImplementedError(f"line {self.line}: the emulator does not know {self.text!r}")


def _split(text: str) -> list[str]:
    return [part.strip() for part in re.findall(r"(?:\{[^}]*\}|\[(?:[^\[\]{}]|\{[^}]*\})*\]|[^,\[{])+", text)]


def header() -> str:
    """The names above as C++ enumerations, and the fields of a record."""
    names = {
        "Operation": [f"OP_{name}" for name in OPERATIONS],
        "Type": [f"TYPE_{name.upper()}" for name in TYPES],
        "Special": ["SPECIAL_" + re.sub(r"\W", "_", name[1:]).upper() for name in SPECIALS],
        "Space": [f"SPACE_{name.upper()}" for name in SPACES],
        "Comparison": [f"COMPARE_{name.upper()}" for name in COMPARISONS],
        "Shuffle": [f"SHUFFLE_{name.upper()}" for name in SHUFFLES],
        "Vote": [f"VOTE_{name.upper()}" for name in VOTES],
        "Reduction": [f"REDUCE_{name.upper()}" for name in REDUCTIONS],
    }
    constants = (
        "RELU KEEP_NAN MULTICAST TRANSPOSED IN_REGISTERS A_TRANSPOSED B_TRANSPOSED SHARED_WORD SHARED_BASE".split()
    )
    lines = [f"enum {kind} {{{', '.join(values)}}};" for kind, values in names.items()]
    lines += [f"constexpr unsigned {name} = {globals()[name]};" for name in constants]
    return "\n".join([*lines, f"struct Instruction {{ long long {', '.join(FIELDS)}; }};", ""])


class Kernel:
    """The records of one ``.entry``.

    Attributes: ``records``, ``operands`` and ``constants``, arrays for the emulator; ``registers``, how many there are;
    ``parameters``, the (offset, size) of each in a memory of ``bytes``.
    """

    def __init__(self, name: str, parameters: list[tuple[str, int, int]], shared: dict[str, int]) -> None:
        self.name = name
        self.records, self.operands = array("q"), array("i")
        self.registers = len(SPECIALS) + 1
        self.parameters: list[tuple[int, int]] = []
        self.bytes = 0
        self._places = dict(shared)
        for parameter, alignment, size in parameters:
            self.bytes = -(-self.bytes // alignment) * alignment
            self._places[parameter] = self.bytes
            self.parameters.append((self.bytes, size))
            self.bytes += size
        self._constants: dict[int, int] = {}
        self._sink = len(SPECIALS)
        # registers by name, of the kernel and of each open block of inline assembly
        self._scopes: list[dict[str, int]] = [{}]
        self._blocks = [0]
        self._ranges: set[str] = set()
        self._guard = -1, 0
        self._line = 0
        self._labels: dict[tuple[int, str], int] = {}
        self._branches: list[tuple[int, str, list[int]]] = []

    @property
    def constants(self) -> array[int]:
        return array("Q", self._constants)

    def read(self, body: str, line: int) -> None:
        """Append the records of ``body``, the text between the braces, which begins on ``line``."""
        blocks = 0
        for match in re.finditer(r"\s+|[{}]|([A-Za-z_$%][\w$]*)\s*:(?!:)|;|[^;]+;", body):
            token = match[0]
            if match[1]:
                self._labels[self._blocks[-1], match[1]] = len(self.records)
            elif token == "{":
                blocks += 1
                self._blocks.append(blocks)
                self._scopes.append({})
            elif token == "}":
                self._blocks.pop()
                self._scopes.pop()
            elif token.strip(" \t\n;"):
                self._statement(" ".join(token[:-1].split()), line)
            line += token.count("\n")
        self._guard = -1, 0
        self._emit("EXIT")
        for at, label, inside in self._branches:
            targets = [self._labels[block, label] for block in reversed(inside) if (block, label) in self._labels]
            self.records[at + FIELDS.index("target")] = targets[0] // len(FIELDS)

    # ---- operands ----

    def _register(self, name: str) -> int:
        for scope in reversed(self._scopes):
            if name in scope:
                return scope[name]
        prefix = name.rstrip("0123456789")
        if prefix not in self._ranges:
            raise NotImplementedError(f"line {self._line}: the emulator does not know {name!r}")
        return self._declare(name, self._scopes[0])

    def _declare(self, name: str, scope: dict[str, int]) -> int:
        scope[name] = self.registers
        self.registers += 1
        return scope[name]

    def _constant(self, value: int) -> int:
        return -1 - self._constants.setdefault(value & (1 << 64) - 1, len(self._constants))

    def _operand(self, text: str) -> int:
        if text in SPECIALS:
            return SPECIALS.index(text)
        if text == "_":
            return self._sink
        if text in self._places:
            return self._constant(self._places[text])
        if match := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", text):
            return self._constant(int(match[1], 16))
        if match := re.fullmatch(r"(-?(?:0[xX][0-9a-fA-F]+|\d+))U?", text):
            return self._constant(int(match[1], 0))
        return self._register(text)

    def _group(self, text: str) -> list[int]:
        return [self._operand(part) for part in _split(text[1:-1] if text[0] == "{" else text)]

    def _address(self, text: str) -> tuple[int, int]:
        """The operand and the offset of ``[operand + offset]``."""
        base, _, offset = text[1:-1].partition("+")
        return self._operand(base.strip()), int(offset or "0", 0)

    def _tensor(self, text: str) -> list[int]:
        """The tensor map and the coordinates of ``[map, {coordinates}]``."""
        base, coordinates = _split(text[1:-1])
        return [self._operand(base), *self._group(coordinates)]

    # ---- statements ----

    def _emit(self, operation: str, outputs: Sequence[int] = (), inputs: Sequence[int] = (), **given: int) -> None:
        record = dict.fromkeys(FIELDS, 0) | given
        record.update(operation=OPERATIONS.index(operation), guard=self._guard[0], negated=self._guard[1])
        record.update(outputs=len(outputs), inputs=len(inputs), first=len(self.operands), line=self._line)
        self.operands.extend((*outputs, *inputs))
        self.records.extend(record.values())

    def _statement(self, text: str, line: int) -> None:
        self._line, self._guard = line, (-1, 0)
        if text.startswith("."):
            return self._directive(text)
        if match := re.match(r"@(!?)([\w%$]+)\s+(.*)", text):
            self._guard = self._register(match[2]), int(match[1] == "!")
            text = match[3]
        name, _, rest = text.partition(" ")
        head, *modifiers = name.split(".")
        if head in _NO_OPERATION:
            return
        statement = _Statement(text, line, head, modifiers, _split(rest))
        statement.types = [modifier for modifier in modifiers if modifier in TYPES]
        statement.modifiers = [modifier for modifier in modifiers if modifier not in TYPES]
        if head in _SIMPLE:
            self._plain(_SIMPLE[head], statement, mode=self._rounding(statement))
        elif (method := getattr(self, f"_{head}", None)) is not None:
            method(statement)
        else:
            raise statement.unknown()
        if not _HINTS.issuperset(statement.modifiers):
            raise statement.unknown()

    def _directive(self, text: str) -> None:
        if match := re.match(r"\.reg\s+\.\w+\s+(.*)", text):
            for name in _split(match[1]):
                if "<" in name:
                    self._ranges.add(name.partition("<")[0])
                else:
                    self._declare(name, self._scopes[-1])
        elif not text.startswith(".pragma"):
            raise NotImplementedError(f"line {self._line}: the emulator does not know {text!r}")

    def _plain(self, operation: str, statement: _Statement, **given: int) -> None:
        out, *arguments = statement.arguments
        kind = TYPES.index(statement.types[0])
        self._emit(operation, [self._operand(out)], [self._operand(a) for a in arguments], type=kind, **given)

    def _rounding(self, s: _Statement) -> int:
        return next((i for i, name in enumerate(ROUNDINGS) if s.take(name)), 0)

    def _min(self, s: _Statement) -> None:
        self._plain(s.head.upper(), s, flags=RELU * s.take("relu") | KEEP_NAN * s.take("NaN"))

    _max = _min

    def _rcp(self, s: _Statement) -> None:
        # approximate ones are exact here, and flush nothing
        s.take("approx")
        s.take("ftz")
        self._plain(s.head.upper(), s, mode=self._rounding(s))

    _sqrt = _rcp

    def _mul(self, s: _Statement) -> None:
        operation = "MUL_HI" if s.take("hi") else "MUL_WIDE" if s.take("wide") else "MUL"
        self._plain(operation, s, mode=self._rounding(s))

    def _mad(self, s: _Statement) -> None:
        self._plain("MAD", s)

    def _dp4a(self, s: _Statement) -> None:
        self._plain(s.head.upper(), s, source=TYPES.index(s.types[1]))

    def _dp2a(self, s: _Statement) -> None:
        self._plain("DP2A", s, source=TYPES.index(s.types[1]), mode=int(s.take("hi")))

    def _setp(self, s: _Statement) -> None:
        self._plain("SETP", s, mode=s.one_of(COMPARISONS))

    def _set(self, s: _Statement) -> None:
        self._plain("SET", s, source=TYPES.index(s.types[1]), mode=s.one_of(COMPARISONS))

    def _cvt(self, s: _Statement) -> None:
        # a rounding to the nearest, or none; an integer from fp32 is truncated
        s.take("rzi" if s.types[:2] == ["s32", "f32"] else "rn")
        self._plain("CVT", s, source=TYPES.index(s.types[1]), flags=RELU * s.take("relu"))

    def _cvta(self, s: _Statement) -> None:
        s.modifiers.clear()
        self._plain("MOV", s)

    def _mapa(self, s: _Statement) -> None:
        s.take("shared::cluster")
        self._plain("MAPA", s)

    def _mov(self, s: _Statement) -> None:
        outputs, inputs = (self._group(argument) for argument in s.arguments)
        operation = "PACK" if s.arguments[1][0] == "{" else "UNPACK" if s.arguments[0][0] == "{" else "MOV"
        self._emit(operation, outputs, inputs, type=TYPES.index(s.types[0]))

    def _space(self, s: _Statement) -> int:
        for name in ("shared::cluster", "shared::cta"):
            if s.take(name):
                return SPACES.index("shared")
        return next((i for i, name in enumerate(SPACES) if s.take(name)), SPACES.index("generic"))

    def _width(self, s: _Statement) -> None:
        for name in ("v2", "v4"):
            s.take(name)

    def _ld(self, s: _Statement) -> None:
        self._width(s)
        base, offset = self._address(s.arguments[1])
        kind = TYPES.index(s.types[0])
        # loads with an order are of what other CTAs write
        flags = SHARED_WORD * (s.take("acquire") or s.take("relaxed"))
        given = {"type": kind, "mode": self._space(s), "offset": offset, "flags": flags}
        self._emit("LOAD", self._group(s.arguments[0]), [base], **given)

    def _st(self, s: _Statement) -> None:
        self._width(s)
        (base, offset), kind = self._address(s.arguments[0]), TYPES.index(s.types[0])
        given, space = [base, *self._group(s.arguments[1])], self._space(s)
        if s.take("async"):
            s.take("mbarrier::complete_tx::bytes")
            barrier, offset2 = self._address(s.arguments[2])
            self._emit("ST_ASYNC", [], [*given, barrier], type=kind, offset=offset, offset2=offset2)
        else:
            self._emit("STORE", [], given, type=kind, mode=space, offset=offset)

    def _atom(self, s: _Statement) -> None:
        *outputs, address, value = s.arguments
        base, offset = self._address(address)
        given = {"type": TYPES.index(s.types[0]), "mode": self._space(s), "offset": offset}
        operation = s.one_of(REDUCTIONS)
        self._emit("ATOM", [self._operand(o) for o in outputs], [base, self._operand(value)], flags=operation, **given)

    _red = _atom

    def _bra(self, s: _Statement) -> None:
        self._branches.append((len(self.records), s.arguments[0], list(self._blocks)))
        self._emit("BRANCH")

    def _ret(self, s: _Statement) -> None:
        self._emit("EXIT")

    _exit = _ret

    # ---- warps, barriers ----

    def _bar(self, s: _Statement) -> None:
        operation = "BAR_WARP" if s.take("warp") else "BAR_ARRIVE" if s.take("arrive") else "BAR_SYNC"
        self._emit(operation, [], [self._operand(argument) for argument in s.arguments])

    def _barrier(self, s: _Statement) -> None:
        if not s.take("cluster"):
            raise s.unknown()
        arrives = s.take("arrive") or not s.take("wait")
        self._emit("CLUSTER_ARRIVE" if arrives else "CLUSTER_WAIT")

    def _collective(self, s: _Statement, operation: str, **given: int) -> None:
        outputs = [self._operand(out) for out in s.arguments[0].split("|")]
        self._emit(operation, outputs, [self._operand(argument) for argument in s.arguments[1:]], **given)

    def _shfl(self, s: _Statement) -> None:
        self._collective(s, "SHFL", mode=s.one_of(SHUFFLES))

    def _vote(self, s: _Statement) -> None:
        self._collective(s, "VOTE", mode=s.one_of(VOTES))

    def _redux(self, s: _Statement) -> None:
        self._collective(s, "REDUX", type=TYPES.index(s.types[0]), mode=s.one_of(REDUCTIONS))

    def _elect(self, s: _Statement) -> None:
        self._collective(s, "ELECT")

    def _mbarrier(self, s: _Statement) -> None:
        for name in ("shared::cluster", "shared::cta", "shared"):
            s.take(name)
        if s.take("try_wait"):
            if not s.take("parity"):
                raise s.unknown()
            base, offset = self._address(s.arguments[1])
            outputs, given = [self._operand(s.arguments[0])], [base, self._operand(s.arguments[2])]
            return self._emit("MBAR_TRY", outputs, given, offset=offset)
        initial = s.take("init")
        if not initial and not s.take("arrive"):
            raise s.unknown()
        # the state that an arrival returns is never read
        arguments = s.arguments if s.arguments[0][0] == "[" else s.arguments[1:]
        base, offset = self._address(arguments[0])
        count = self._operand(arguments[1]) if arguments[1:] else self._constant(1)
        operation = "MBAR_INIT" if initial else "MBAR_EXPECT" if s.take("expect_tx") else "MBAR_ARRIVE"
        self._emit(operation, [], [base, count], offset=offset)

    # ---- copies ----

    def _cp(self, s: _Statement) -> None:
        s.take("async")
        if s.take("bulk"):
            return self._bulk(s)
        if s.take("mbarrier"):
            if not (s.take("arrive") and s.take("noinc")):
                raise s.unknown()
            base, offset = self._address(s.arguments[0])
            self._emit("CP_ARRIVE", [], [base], offset=offset)
        elif s.take("commit_group"):
            self._emit("CP_COMMIT")
        elif s.take("wait_group"):
            self._emit("CP_WAIT", mode=int(s.arguments[0]))
        else:
            target, source, size, *read = s.arguments
            (base, offset), (base2, offset2) = self._address(target), self._address(source)
            given = [base, base2, self._operand(read[0] if read else size)]
            self._emit("CP_ASYNC", [], given, offset=offset, offset2=offset2, mode=int(size))
        for name in ("shared", "global"):
            s.take(name)

    def _bulk(self, s: _Statement) -> None:
        if s.take("commit_group"):
            return
        if s.take("wait_group"):
            return self._emit("TMA_WAIT")
        # a cache hint is the last argument
        arguments = s.arguments[:-1] if s.take("L2::cache_hint") else s.arguments
        rank = next((n for n in range(1, 6) if s.take(f"{n}d")), 0)
        if not s.take("tensor"):
            target, source, size, barrier = arguments
            (base, offset), (base2, offset2) = self._address(target), self._address(source)
            signal, offset3 = self._address(barrier)
            if offset3 or not s.take("mbarrier::complete_tx::bytes"):
                raise s.unknown()
            given = [base, base2, self._operand(size), signal]
            self._emit("BULK_LOAD", [], given, offset=offset, offset2=offset2)
        elif s.take("bulk_group"):
            tensor, source = arguments
            base, offset = self._address(source)
            self._emit("TMA_STORE", [], [base, *self._tensor(tensor)], offset=offset, mode=rank)
        else:
            s.take("mbarrier::complete_tx::bytes")
            target, tensor, barrier, *mask = arguments
            (base, offset), (base2, offset2) = self._address(target), self._address(barrier)
            given = [base, base2, *self._tensor(tensor), *(self._operand(m) for m in mask)]
            flags = MULTICAST * s.take("multicast::cluster")
            self._emit("TMA_LOAD", [], given, offset=offset, offset2=offset2, mode=rank, flags=flags)
        for name in ("shared::cluster", "shared::cta", "global"):
            s.take(name)

    # ---- tensor cores ----

    def _ldmatrix(self, s: _Statement) -> None:
        s.take("shared")
        base, offset = self._address(s.arguments[1])
        self._emit("LDMATRIX", self._group(s.arguments[0]), [base], offset=offset, flags=TRANSPOSED * s.take("trans"))

    def _stmatrix(self, s: _Statement) -> None:
        s.take("shared")
        base, offset = self._address(s.arguments[0])
        given = [base, *self._group(s.arguments[1])]
        self._emit("STMATRIX", [], given, offset=offset, flags=TRANSPOSED * s.take("trans"))

    def _mma(self, s: _Statement) -> None:
        sizes = ("m16n8k32",) if s.types[1] == "e4m3" else ("m16n8k16", "m16n8k8")
        if not any(map(s.take, sizes)) or s.types[1] not in ("bf16", "f16", "e4m3"):
            raise s.unknown()
        outputs, *inputs = (self._group(argument) for argument in s.arguments)
        given = [operand for group in inputs for operand in group]
        self._emit("MMA", outputs, given, type=TYPES.index(s.types[1]), mode=8)

    def _wgmma(self, s: _Statement) -> None:
        if s.take("fence"):
            return
        if s.take("commit_group"):
            return self._emit("WGMMA_COMMIT")
        if s.take("wait_group"):
            return self._emit("WGMMA_WAIT", mode=int(s.arguments[0]))
        shape = next((m for m in s.modifiers if re.fullmatch(r"m64n\d+k(16|32)", m)), None)
        if not s.take("mma_async") or shape is None:
            raise s.unknown()
        s.take(shape)
        outputs, a, b, scale, *immediate = s.arguments
        # 16-bit types: signs of A and B, which are 1, and the transpositions of those in shared memory
        signs, transposed = [int(i) for i in immediate[:2]], [int(i) for i in immediate[2:]]
        if signs not in ([], [1, 1]):
            raise s.unknown()
        in_registers = a[0] == "{"
        flags = IN_REGISTERS * in_registers
        if transposed:
            flags |= A_TRANSPOSED * (transposed[0] if not in_registers else 0) | B_TRANSPOSED * transposed[-1]
        given = [self._operand(scale), self._operand(b), *self._group(a)]
        # sums of bytes are far from saturating
        s.take("satfinite")
        columns = int(re.findall(r"\d+", shape)[1])
        self._emit("WGMMA", self._group(outputs), given, type=TYPES.index(s.types[1]), mode=columns, flags=flags)


def kernels(text: str) -> Iterator[Kernel]:
    clean = re.sub(r"//[^\n]*", "", text)
    shared = dict.fromkeys(re.findall(r"\.extern\s+\.shared\s+\.align\s+\d+\s+\.b8\s+(\w+)\[\]", clean), SHARED_BASE)
    for match in re.finditer(r"\.visible\s+\.entry\s+(\w+)\(([^)]*)\)[^{]*\{", clean):
        parameters = []
        for parameter in filter(None, (" ".join(p.split()) for p in match[2].split(","))):
            if array_of := re.fullmatch(r"\.param \.align (\d+) \.b8 (\w+)\[(\d+)\]", parameter):
                parameters.append((array_of[2], int(array_of[1]), int(array_of[3])))
            elif plain := re.fullmatch(r"\.param \.[a-z](\d+)(?: \.ptr [^%]*)? (\w+)", parameter):
                parameters.append((plain[2], int(plain[1]) // 8, int(plain[1]) // 8))
            else:
                raise NotImplementedError(f"the emulator does not know the parameter {parameter!r}")
        depth, end = 1, match.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(clean[end], 0)
            end += 1
        kernel = Kernel(match[1], parameters, shared)
        kernel.read(clean[match.end() : end - 1], clean.count("\n", 0, match.end()) + 1)
        yield kernel
