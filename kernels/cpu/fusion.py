"""What a recorded list of ops is turned into before it is replayed: fewer ops, fewer meetings of threads."""

from __future__ import annotations

from vkit.kernels.cpu.library import FLAG_INDEPENDENT, OPCODE, OPCODES, Op
from vkit.kernels.cpu.tape import Node, Region


def fuse(nodes: list[Node], keep: int) -> list[Node]:
    """The same results with fewer ops. `keep` is the address of what must still be written at the end."""
    nodes = _fuse_gates(nodes, keep)
    nodes = _fuse_quantising(_hoist_quantising(nodes))
    _drop_unread(nodes, keep)
    _free_independent(nodes)
    return nodes


def _name(node: Node) -> str:
    opcode: int = node.op.opcode
    return OPCODES[opcode]


def _is_read_later(nodes: list[Node], index: int, region: Region) -> bool:
    """Whether something after `index` reads the region before it is written anew.

    Memory goes to another tensor only when its last one is gone, so a write by an op that reads nothing of it ends the
    old contents as a whole.
    """
    for node in nodes[index + 1 :]:
        if any(read.overlaps(region) for read in node.reads):
            return True
        if any(write.overlaps(region) for write in node.writes):
            return False
    return False


def _fuse_gates(nodes: list[Node], keep: int) -> list[Node]:
    """Two products of one input and the gated activation of their results become one op."""
    result: list[Node] = []
    for index, node in enumerate(nodes):
        gate, up = (result[-2], result[-1]) if len(result) >= 2 else (None, None)
        is_pair = gate is not None and up is not None and _is_gate_pair(gate, up, node)
        if is_pair and node.reads[0].start != keep and not _is_read_later(nodes, index, node.reads[0]):
            assert gate is not None
            assert up is not None
            result[-2:] = [_gated(gate, up, node)]
        else:
            result.append(node)
    return result


def _is_gate_pair(gate: Node, up: Node, glu: Node) -> bool:
    if _name(glu) != "GLU" or _name(gate) != _name(up) or _name(gate) not in ("GEMM", "GEMM_PAIRS"):
        return False
    one, two, width = gate.op, up.op, glu.op.n[0]
    size = glu.reads[0].row_bytes // (2 * width)
    same_shape = list(one.n[:5]) == list(two.n[:5]) and one.n[1] == width and one.n[3] == glu.op.n[1]
    same_input = one.p[0] == two.p[0] and (one.rows, one.row_factor) == (two.rows, two.row_factor)
    adjacent = one.p[3] == glu.op.p[0] and two.p[3] == (glu.op.p[0] or 0) + width * size
    return same_shape and same_input and adjacent and not one.n[5] and not two.n[5]


def _gated(gate: Node, up: Node, glu: Node) -> Node:
    op = Op.from_buffer_copy(gate.op)
    op.p[3], op.p[4], op.p[5] = glu.op.p[1], up.op.p[1], up.op.p[2]
    op.n[4], op.n[5] = glu.op.n[3], glu.op.n[4]
    return Node(op, gate.reads, glu.writes)


def _hoist_quantising(nodes: list[Node]) -> list[Node]:
    """Conversions move up to what they convert, past products of other conversions."""
    result: list[Node] = []
    for node in nodes:
        place = len(result)
        if _name(node) == "QUANTIZE":
            while place and not _conflict(node, result[place - 1]):
                place -= 1
        result.insert(place, node)
    return result


def _fuse_quantising(nodes: list[Node]) -> list[Node]:
    """Norms and gated activations write the blocks of the product that follows them."""
    result: list[Node] = []
    for node in nodes:
        last = result[-1] if result else None
        if _name(node) == "QUANTIZE" and node.op.n[3] >= 0 and last is not None and _writes_input(last, node):
            slot, number = (5, 6) if _name(last) == "RMS_NORM" else (2, 5)
            last.op.p[slot], last.op.n[number] = node.op.p[1], node.op.n[3]
            last.writes = [*last.writes, *node.writes]
        else:
            result.append(node)
    return result


def _writes_input(last: Node, quantise: Node) -> bool:
    slot, out = {"RMS_NORM": (5, 3), "GLU": (2, 1)}.get(_name(last), (None, None))
    if slot is None or out is None or last.op.p[slot] is not None:
        return False
    one, two = last.op, quantise.op
    same_rows = (one.rows, one.row_factor) == (two.rows, two.row_factor)
    same_memory = one.p[out] == two.p[0] and last.writes[0] == quantise.reads[0]
    return same_rows and same_memory and one.n[0] == two.n[0] and one.n[0] % 32 == 0


def _drop_unread(nodes: list[Node], keep: int) -> None:
    """Norms and gated activations whose plain result nobody reads write only their blocks."""
    for index, node in enumerate(nodes):
        out, blocks = {"RMS_NORM": (3, 5), "GLU": (1, 2)}.get(_name(node), (0, 0))
        if not out or node.op.p[blocks] is None or node.op.p[out] in (None, keep):
            continue
        if not _is_read_later(nodes, index, node.writes[0]):
            node.op.p[out] = None
            node.writes = node.writes[1:]


def _free_independent(nodes: list[Node]) -> None:
    """Mark ops that need nothing of those since threads last met."""
    together: list[Node] = []
    for node in nodes:
        if together and not any(_conflict(node, other) for other in together):
            node.op.flags |= FLAG_INDEPENDENT
        else:
            together = []
        together.append(node)


def _conflict(one: Node, two: Node) -> bool:
    return (
        any(a.overlaps(b) for a in one.writes for b in two.reads + two.writes)
        or any(a.overlaps(b) for a in one.reads for b in two.writes)
        or one.op.opcode == two.op.opcode == OPCODE["ATTENTION"]  # both use the shared memory
    )
