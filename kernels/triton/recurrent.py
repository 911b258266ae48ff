"""Kernels of layers with a matrix per sequence and head: the gated delta rule, and Mamba-2, which has no delta.

Both are S ← decay S + k v'ᵀ, o = Sᵀ q. For Mamba-2 v' is the input times its step; for the delta rule it is what v
lacks of what S holds already. A sequence of one token, or one under verification, runs token by token
(`step_kernel`, bound by reading and writing S). A longer one goes by chunks: inside a chunk what each token writes,
given that it sees what those before it wrote, is a triangular system (`solve_kernel`); then S passes from chunk to
chunk (`pass_kernel`, serial); then outputs (`output_kernel`). All in float32; products in three parts of tf32.

Decay is per head, or per channel of k (Kimi): then scores need a value for each pair of tokens and channel, so chunks
are short. Decays are summed before they are exponentiated, since exp(−sum) alone overflows, and masked before that too.
Sources: Yang et al. 2024, Gated Delta Networks, section 3.3; Dao and Gu 2024, section 6.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vkit.kernels.triton.common import INTERPRETED, LOG2E, rounded

TINY = tl.constexpr(1e-6)


@triton.jit  # type: ignore[untyped-decorator]
def exact_product(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """a @ b of float32, nearly as exact as float32 sums of float32 products."""
    if INTERPRETED:
        return tl.dot(a, b, input_precision="ieee")
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit  # type: ignore[untyped-decorator]
def sigmoid(x: tl.tensor) -> tl.tensor:
    """1 / (1 + exp(−x))."""
    return 1.0 / (1.0 + tl.exp2(-x * LOG2E))


@triton.jit  # type: ignore[untyped-decorator]
def softplus(x: tl.tensor) -> tl.tensor:
    """log(1 + exp(x)), as exact where it is small. Source: log(1 + f) = 2 artanh(f / (2 + f)), to the ninth power."""
    f = tl.exp2(-tl.abs(x) * LOG2E)
    s = f / (2.0 + f)
    z = s * s
    near = 2.0 * (s + s * z * (1.0 / 3 + z * (1.0 / 5 + z * (1.0 / 7 + z * (1.0 / 9)))))
    return tl.maximum(x, 0.0) + near


@triton.jit  # type: ignore[untyped-decorator]
def is_stepped(targets: tl.tensor, start: tl.tensor, count: tl.tensor, HAS_TARGETS: tl.constexpr) -> tl.tensor:
    """Whether a sequence goes token by token: it has one, or is under verification (its first token has a target)."""
    if HAS_TARGETS:
        return (count == 1) | ((count > 1) & (tl.load(targets + start, mask=count > 1, other=-1) >= 0))
    return count == 1


@triton.jit  # type: ignore[untyped-decorator]
def chunk_at(
    item: tl.tensor, cu_seqlens: tl.tensor, num_sequences: tl.tensor, LENGTH: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """(sequence, its first token, its tokens, the chunk's first among them), which may be beyond them.

    Sequence b has its chunks from cu_seqlens[b] // LENGTH + b on, so that no host needs to know the lengths.
    """
    low = tl.zeros([], tl.int32)
    high = low + num_sequences
    while low < high:
        middle = (low + high) // 2
        if tl.load(cu_seqlens + middle) // LENGTH + middle <= item:
            low = middle + 1
        else:
            high = middle
    sequence = low - 1
    start = tl.load(cu_seqlens + sequence)
    count = tl.load(cu_seqlens + sequence + 1) - start
    return sequence, start, count, (item - start // LENGTH - sequence) * LENGTH


@triton.jit  # type: ignore[untyped-decorator]
def rows_of(
    x: tl.tensor, token: tl.tensor, is_token: tl.tensor, stride: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """float32 rows of the tokens (L, BLOCK); zeros where there is nothing."""
    return slice_of(x, token, is_token, stride, 0, WIDTH, BLOCK)


@triton.jit  # type: ignore[untyped-decorator]
def slice_of(
    x: tl.tensor,
    token: tl.tensor,
    is_token: tl.tensor,
    stride: tl.tensor,
    first: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """float32 columns first .. first + BLOCK - 1 of the tokens' rows; zeros where there is nothing."""
    column = first + tl.arange(0, BLOCK)
    at = x + token.to(tl.int64)[:, None] * stride + column[None, :]
    return tl.load(at, mask=is_token[:, None] & (column < WIDTH)[None, :], other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def lengths_inverse(rows: tl.tensor, IS_DELTA: tl.constexpr) -> tl.tensor:
    """What rows are multiplied by to have length one, if they must; (L, 1)."""
    return (
        tl.rsqrt(tl.sum(rows * rows, 1) + TINY)[:, None] if IS_DELTA else tl.full([rows.shape[0], 1], 1.0, tl.float32)
    )


@triton.jit  # type: ignore[untyped-decorator]
def factors(
    write: tl.tensor,
    constants: tl.tensor,
    token: tl.tensor,
    is_token: tl.tensor,
    head: tl.tensor,
    num_heads: tl.tensor,
    write_token: tl.tensor,
    least_step: tl.tensor,
    IS_DELTA: tl.constexpr,
) -> tl.tensor:
    """How much each token writes (L,): σ(write) for the delta rule, the step for Mamba-2; zero where there is none.

    constants (3, H): Mamba-2's logarithm of the rate, skip and step bias.
    """
    raw = tl.load(write + token.to(tl.int64) * write_token + head, mask=is_token, other=0.0).to(tl.float32)
    if IS_DELTA:
        found = sigmoid(raw)
    else:
        found = tl.maximum(softplus(raw + tl.load(constants + 2 * num_heads + head)), least_step)
    return tl.where(is_token, found, 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def decays(
    decay: tl.tensor,
    constants: tl.tensor,
    factor: tl.tensor,
    token: tl.tensor,
    is_token: tl.tensor,
    head: tl.tensor,
    num_heads: tl.tensor,
    decay_token: tl.tensor,
    first: tl.tensor,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_CHANNELS: tl.constexpr,
    IS_DELTA: tl.constexpr,
) -> tl.tensor:
    """Logarithms to base 2 of each token's decay, of channels from `first` on (L, BLOCK_D), or (L, 1); else zero."""
    if HAS_CHANNELS:
        found = slice_of(decay + head * D, token, is_token, decay_token, first, D, BLOCK_D)
    elif IS_DELTA:
        found = tl.load(decay + token.to(tl.int64) * decay_token + head, mask=is_token, other=0.0)[:, None]
    else:
        found = (-tl.exp2(tl.load(constants + head) * LOG2E) * factor)[:, None]
    return found * LOG2E


@triton.jit  # type: ignore[untyped-decorator]
def scores_of(
    a: tl.tensor, k: tl.tensor, total: tl.tensor, is_seen: tl.tensor, LENGTH: tl.constexpr, HAS_CHANNELS: tl.constexpr
) -> tl.tensor:
    """Σ_c a_ic k_jc 2^(total_ic − total_jc) where j is seen by i, else 0; (L, L)."""
    if HAS_CHANNELS:
        row = tl.arange(0, LENGTH)
        scores = tl.zeros([LENGTH, LENGTH], tl.float32)
        for j in range(LENGTH):
            is_row = (row == j)[:, None]
            k_j = tl.sum(tl.where(is_row, k, 0.0), 0)
            total_j = tl.sum(tl.where(is_row, total, 0.0), 0)
            share = tl.exp2(tl.minimum(total - total_j[None, :], 0.0))  # above zero only where nothing is seen
            scores = tl.where((row == j)[None, :], tl.sum(a * k_j[None, :] * share, 1)[:, None], scores)
        return tl.where(is_seen, scores, 0.0)
    return exact_product(a, tl.trans(k)) * shares(total, is_seen)


@triton.jit  # type: ignore[untyped-decorator]
def shares(total: tl.tensor, is_seen: tl.tensor) -> tl.tensor:
    """2^(total_i − total_j) where j is seen by i, else 0; (L, L). total (L, 1)."""
    flat = tl.sum(total, 1)
    return tl.exp2(tl.where(is_seen, flat[:, None] - flat[None, :], -float("inf")))


@triton.jit  # type: ignore[untyped-decorator]
def key_head(head: tl.tensor, num_heads: tl.tensor, KEY_HEADS: tl.constexpr, IS_TILED: tl.constexpr) -> tl.tensor:
    """The key head that a head reads."""
    return head % KEY_HEADS if IS_TILED else head // (num_heads // KEY_HEADS)


@triton.jit  # type: ignore[untyped-decorator]
def step_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    decay: tl.tensor,
    write: tl.tensor,
    constants: tl.tensor,
    state: tl.tensor,
    out: tl.tensor,
    blocks: tl.tensor,
    is_fresh: tl.tensor,
    cu_seqlens: tl.tensor,
    targets: tl.tensor,
    least_step: tl.tensor,
    scale: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    v_token: tl.tensor,
    v_head: tl.tensor,
    decay_token: tl.tensor,
    write_token: tl.tensor,
    state_row: tl.tensor,
    KEY_HEADS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HAS_CHANNELS: tl.constexpr,
    HAS_TARGETS: tl.constexpr,
    IS_DELTA: tl.constexpr,
    IS_TILED: tl.constexpr,
) -> None:
    """Token by token, for BLOCK_DV columns of one head's matrix. Grid (B, H, columns). Rows below 0 are left alone.

    After each token the matrix is rounded to the state's type, as it would be between steps.
    """
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    start = tl.load(cu_seqlens + sequence)
    count = tl.load(cu_seqlens + sequence + 1) - start
    if is_stepped(targets, start, count, HAS_TARGETS):
        row = tl.arange(0, BLOCK_D)
        value = tl.program_id(2) * BLOCK_DV + tl.arange(0, BLOCK_DV)
        is_value = value < DV
        is_cell = (row < D)[:, None] & is_value[None, :]
        inside = head * D * DV + row[:, None] * DV + value[None, :]
        own = tl.load(blocks + sequence)
        is_known = (own >= 0) & (tl.load(is_fresh + sequence) == 0)
        s = tl.load(state + own * state_row + inside, mask=is_cell & is_known, other=0.0).to(tl.float32)
        source = key_head(head, num_heads, KEY_HEADS, IS_TILED)
        one = tl.arange(0, 1)
        for place in range(count):
            token = start + place + one
            is_token = one == 0
            q_row = rows_of(q + source * q_head, token, is_token, q_token, D, BLOCK_D)
            k_row = rows_of(k + source * k_head, token, is_token, k_token, D, BLOCK_D)
            q_own = tl.sum(q_row * lengths_inverse(q_row, IS_DELTA), 0) * scale
            k_own = tl.sum(k_row * lengths_inverse(k_row, IS_DELTA), 0)
            v_at = v + (start + place).to(tl.int64) * v_token + head * v_head + value
            v_own = tl.load(v_at, mask=is_value, other=0.0).to(tl.float32)
            factor = factors(write, constants, token, is_token, head, num_heads, write_token, least_step, IS_DELTA)
            fade = decays(
                decay, constants, factor, token, is_token, head, num_heads, decay_token,
                0, D, BLOCK_D, HAS_CHANNELS, IS_DELTA,
            )  # fmt: skip
            s = s * tl.exp2(tl.trans(fade))
            amount = tl.sum(factor, 0)
            if IS_DELTA:  # noqa: SIM108 (chosen while compiling)
                written = amount * (v_own - tl.sum(k_own[:, None] * s, 0))
            else:
                written = amount * v_own
            s += k_own[:, None] * written[None, :]
            o = tl.sum(q_own[:, None] * s, 0)
            if not IS_DELTA:
                o += tl.load(constants + num_heads + head) * v_own
            o_at = out + ((start + place).to(tl.int64) * num_heads + head) * DV + value
            tl.store(o_at, rounded(o, out.dtype.element_ty), mask=is_value)
            kept = rounded(s, state.dtype.element_ty)
            s = kept.to(tl.float32)
            to = own
            if HAS_TARGETS:
                to = tl.load(targets + start + place)
            tl.store(state + to * state_row + inside, kept, mask=is_cell & (to >= 0))


@triton.jit(do_not_specialize=["num_sequences", "num_heads"])  # type: ignore[untyped-decorator]
def solve_kernel(
    k: tl.tensor,
    v: tl.tensor,
    decay: tl.tensor,
    write: tl.tensor,
    solved_k: tl.tensor,
    solved_v: tl.tensor,
    cu_seqlens: tl.tensor,
    targets: tl.tensor,
    num_sequences: tl.tensor,
    num_heads: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    v_token: tl.tensor,
    v_head: tl.tensor,
    decay_token: tl.tensor,
    write_token: tl.tensor,
    KEY_HEADS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LENGTH: tl.constexpr,
    HAS_CHANNELS: tl.constexpr,
    HAS_TARGETS: tl.constexpr,
    IS_TILED: tl.constexpr,
) -> None:
    """What the tokens of a chunk write, as far as the chunk alone says. Grid (chunks at most, H).

    With A_ij = β_i (k_i·k_j) decay from j to i for j < i: solved_k (T, H, D) = (I + A)⁻¹ β e^total k, and
    solved_v (T, H, DV) = (I + A)⁻¹ β v, float32. The inverse row by row: powers of A would cancel where keys repeat.
    """
    head = tl.program_id(1)
    _, start, count, first = chunk_at(tl.program_id(0), cu_seqlens, num_sequences, LENGTH)
    if (first < count) & (not is_stepped(targets, start, count, HAS_TARGETS)):
        row = tl.arange(0, LENGTH)
        token = start + first + row
        is_token = first + row < count
        source = key_head(head, num_heads, KEY_HEADS, IS_TILED)
        k_rows = k + source * k_head
        beta = factors(write, write, token, is_token, head, num_heads, write_token, 0.0, True)
        fade = decays(
            decay, write, beta, token, is_token, head, num_heads, decay_token, 0, D, BLOCK_D, HAS_CHANNELS, True
        )
        total = tl.cumsum(fade, 0)
        is_seen = row[:, None] > row[None, :]
        if HAS_CHANNELS:
            keys = rows_of(k_rows, token, is_token, k_token, D, BLOCK_D)
            keys = keys * lengths_inverse(keys, True)
            a = scores_of(keys, keys, total, is_seen, LENGTH, HAS_CHANNELS) * beta[:, None]
        else:
            a = tl.zeros([LENGTH, LENGTH], tl.float32)
            square = tl.zeros([LENGTH], tl.float32)
            for piece in range(0, BLOCK_D, BLOCK_K):  # in pieces, since registers are few
                part = slice_of(k_rows, token, is_token, k_token, piece, D, BLOCK_K)
                a += exact_product(part, tl.trans(part))
                square += tl.sum(part * part, 1)
            unit = tl.rsqrt(square + TINY)
            a = a * shares(total, is_seen) * (unit * beta)[:, None] * unit[None, :]
        inverse = tl.where(row[:, None] == row[None, :], 1.0, 0.0)
        for i in range(1, tl.minimum(LENGTH, count - first)):
            is_row = (row == i)[:, None]
            own = tl.sum(tl.where(is_row, a, 0.0), 0)
            before = tl.sum(own[:, None] * inverse, 0)
            inverse = tl.where(is_row, inverse - before[None, :], inverse)
        k_to = solved_k + (token.to(tl.int64) * num_heads + head)[:, None] * D
        if HAS_CHANNELS:
            channel = tl.arange(0, BLOCK_D)
            found = exact_product(inverse, keys * tl.exp2(total) * beta[:, None])
            tl.store(k_to + channel[None, :], found, mask=is_token[:, None] & (channel < D)[None, :])
        else:
            for piece in range(0, BLOCK_D, BLOCK_K):
                channel = piece + tl.arange(0, BLOCK_K)
                part = slice_of(k_rows, token, is_token, k_token, piece, D, BLOCK_K)
                part = exact_product(inverse, part * (tl.exp2(total) * (unit * beta)[:, None]))
                tl.store(k_to + channel[None, :], part, mask=is_token[:, None] & (channel < D)[None, :])
        for piece in range(0, DV, BLOCK_DV):
            column = piece + tl.arange(0, BLOCK_DV)
            is_value = is_token[:, None] & (column < DV)[None, :]
            v_at = v + head * v_head + token.to(tl.int64)[:, None] * v_token + column[None, :]
            values = tl.load(v_at, mask=is_value, other=0.0).to(tl.float32)
            v_to = solved_v + (token.to(tl.int64) * num_heads + head)[:, None] * DV + column[None, :]
            tl.store(v_to, exact_product(inverse, values * beta[:, None]), mask=is_value)


@triton.jit  # type: ignore[untyped-decorator]
def advanced(s: tl.tensor, keys: tl.tensor, fade: tl.tensor, amount: tl.tensor) -> tl.tensor:
    """The matrix after a chunk: what is left of it, and of what each token writes."""
    left = tl.sum(fade, 0)
    faded = keys * tl.exp2(left[None, :] - tl.cumsum(fade, 0))
    return s * tl.exp2(left)[:, None] + exact_product(tl.trans(faded), amount)


@triton.jit  # type: ignore[untyped-decorator]
def pass_kernel(
    k: tl.tensor,
    v: tl.tensor,
    decay: tl.tensor,
    write: tl.tensor,
    constants: tl.tensor,
    solved_k: tl.tensor,
    solved_v: tl.tensor,
    written: tl.tensor,
    passing: tl.tensor,
    state: tl.tensor,
    blocks: tl.tensor,
    is_fresh: tl.tensor,
    cu_seqlens: tl.tensor,
    targets: tl.tensor,
    least_step: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    v_token: tl.tensor,
    v_head: tl.tensor,
    decay_token: tl.tensor,
    write_token: tl.tensor,
    state_row: tl.tensor,
    KEY_HEADS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    LENGTH: tl.constexpr,
    HAS_CHANNELS: tl.constexpr,
    HAS_TARGETS: tl.constexpr,
    IS_DELTA: tl.constexpr,
    IS_TILED: tl.constexpr,
) -> None:
    """The matrix before each chunk, passing (chunks, H, D, DV), and after the last in the state. Grid (B, H, columns).

    For the delta rule also what each token writes, written (T, H, DV) = solved_v − solved_k S.
    """
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    start = tl.load(cu_seqlens + sequence)
    count = tl.load(cu_seqlens + sequence + 1) - start
    if (count > 0) & (not is_stepped(targets, start, count, HAS_TARGETS)):
        # The matrix in two halves where it is large: operands of a product are in registers twice.
        PART: tl.constexpr = BLOCK_D // 2 if BLOCK_D > 64 else BLOCK_D
        IS_CUT: tl.constexpr = BLOCK_D > 64
        channel = tl.arange(0, PART)
        value = tl.program_id(2) * BLOCK_DV + tl.arange(0, BLOCK_DV)
        is_cell = (channel < D)[:, None] & (value < DV)[None, :]
        is_other = (PART + channel < D)[:, None] & (value < DV)[None, :]
        cell = head * D * DV + channel[:, None] * DV + value[None, :]
        own = tl.load(blocks + sequence)
        is_known = (own >= 0) & (tl.load(is_fresh + sequence) == 0)
        state_at = state + own * state_row + cell
        s = tl.load(state_at, mask=is_cell & is_known, other=0.0).to(tl.float32)
        if IS_CUT:
            other = tl.load(state_at + PART * DV, mask=is_other & is_known, other=0.0).to(tl.float32)
        source = key_head(head, num_heads, KEY_HEADS, IS_TILED)
        row = tl.arange(0, LENGTH)
        chunk = (start // LENGTH + sequence).to(tl.int64)
        for first in range(0, count, LENGTH):
            passing_at = passing + chunk * (num_heads * D * DV) + cell
            tl.store(passing_at, s, mask=is_cell)
            if IS_CUT:
                tl.store(passing_at + PART * DV, other, mask=is_other)
            chunk += 1
            token = start + first + row
            is_token = first + row < count
            factor = factors(write, constants, token, is_token, head, num_heads, write_token, least_step, IS_DELTA)
            is_value = is_token[:, None] & (value < DV)[None, :]
            wide = (token.to(tl.int64) * num_heads + head)[:, None]
            if IS_DELTA:
                solved_at = solved_k + head * D
                amount = tl.load(solved_v + wide * DV + value[None, :], mask=is_value, other=0.0)
                amount -= exact_product(slice_of(solved_at, token, is_token, num_heads * D, 0, D, PART), s)
                if IS_CUT:
                    amount -= exact_product(slice_of(solved_at, token, is_token, num_heads * D, PART, D, PART), other)
                tl.store(written + wide * DV + value[None, :], amount, mask=is_value)
            else:
                v_at = v + head * v_head + token.to(tl.int64)[:, None] * v_token + value[None, :]
                amount = tl.load(v_at, mask=is_value, other=0.0).to(tl.float32) * factor[:, None]
            unit = tl.full([LENGTH, 1], 1.0, tl.float32)
            if IS_DELTA:
                whole = rows_of(k + source * k_head, token, is_token, k_token, D, BLOCK_D)
                unit = lengths_inverse(whole, IS_DELTA)
            fade = decays(
                decay, constants, factor, token, is_token, head, num_heads, decay_token,
                0, D, PART, HAS_CHANNELS, IS_DELTA,
            )  # fmt: skip
            keys = slice_of(k + source * k_head, token, is_token, k_token, 0, D, PART) * unit
            s = advanced(s, keys, fade, amount)
            if IS_CUT:
                if HAS_CHANNELS:
                    fade = decays(
                        decay, constants, factor, token, is_token, head, num_heads, decay_token,
                        PART, D, PART, HAS_CHANNELS, IS_DELTA,
                    )  # fmt: skip
                keys = slice_of(k + source * k_head, token, is_token, k_token, PART, D, PART) * unit
                other = advanced(other, keys, fade, amount)
        tl.store(state_at, rounded(s, state.dtype.element_ty), mask=is_cell & (own >= 0))
        if IS_CUT:
            tl.store(state_at + PART * DV, rounded(other, state.dtype.element_ty), mask=is_other & (own >= 0))


@triton.jit(do_not_specialize=["num_sequences", "num_heads"])  # type: ignore[untyped-decorator]
def output_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    decay: tl.tensor,
    write: tl.tensor,
    constants: tl.tensor,
    written: tl.tensor,
    passing: tl.tensor,
    out: tl.tensor,
    cu_seqlens: tl.tensor,
    targets: tl.tensor,
    least_step: tl.tensor,
    scale: tl.tensor,
    num_sequences: tl.tensor,
    num_heads: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    v_token: tl.tensor,
    v_head: tl.tensor,
    decay_token: tl.tensor,
    write_token: tl.tensor,
    KEY_HEADS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LENGTH: tl.constexpr,
    HAS_CHANNELS: tl.constexpr,
    HAS_TARGETS: tl.constexpr,
    IS_DELTA: tl.constexpr,
    IS_TILED: tl.constexpr,
) -> None:
    """out (T, H, DV) of a chunk: from the matrix before it, and what its tokens write. Grid (chunks, H, columns)."""
    item = tl.program_id(0)
    head = tl.program_id(1)
    _, start, count, first = chunk_at(item, cu_seqlens, num_sequences, LENGTH)
    if (first < count) & (not is_stepped(targets, start, count, HAS_TARGETS)):
        row = tl.arange(0, LENGTH)
        value = tl.program_id(2) * BLOCK_DV + tl.arange(0, BLOCK_DV)
        token = start + first + row
        is_token = first + row < count
        source = key_head(head, num_heads, KEY_HEADS, IS_TILED)
        q_rows, k_rows = q + source * q_head, k + source * k_head
        factor = factors(write, constants, token, is_token, head, num_heads, write_token, least_step, IS_DELTA)
        fade = decays(
            decay, constants, factor, token, is_token, head, num_heads, decay_token,
            0, D, BLOCK_D, HAS_CHANNELS, IS_DELTA,
        )  # fmt: skip
        total = tl.cumsum(fade, 0)
        is_value = is_token[:, None] & (value < DV)[None, :]
        v_at = v + head * v_head + token.to(tl.int64)[:, None] * v_token + value[None, :]
        if IS_DELTA:
            at = written + (token.to(tl.int64) * num_heads + head)[:, None] * DV + value[None, :]
            amount = tl.load(at, mask=is_value, other=0.0)
        else:
            amount = tl.load(v_at, mask=is_value, other=0.0).to(tl.float32) * factor[:, None]
        is_seen = row[:, None] >= row[None, :]
        before = passing + (item.to(tl.int64) * num_heads + head) * D * DV + value[None, :]
        if HAS_CHANNELS:
            queries = rows_of(q_rows, token, is_token, q_token, D, BLOCK_D)
            queries = queries * (lengths_inverse(queries, IS_DELTA) * scale)
            keys = rows_of(k_rows, token, is_token, k_token, D, BLOCK_D)
            keys = keys * lengths_inverse(keys, IS_DELTA)
            scores = scores_of(queries, keys, total, is_seen, LENGTH, HAS_CHANNELS)
            channel = tl.arange(0, BLOCK_D)
            is_cell = (channel < D)[:, None] & (value < DV)[None, :]
            s = tl.load(before + channel[:, None] * DV, mask=is_cell, other=0.0)
            o = exact_product(queries * tl.exp2(total), s)
        else:
            scores = tl.zeros([LENGTH, LENGTH], tl.float32)
            o = tl.zeros([LENGTH, BLOCK_DV], tl.float32)
            q_square = tl.zeros([LENGTH], tl.float32)
            k_square = tl.zeros([LENGTH], tl.float32)
            for piece in range(0, BLOCK_D, BLOCK_K):  # in pieces, since registers are few
                q_part = slice_of(q_rows, token, is_token, q_token, piece, D, BLOCK_K)
                k_part = slice_of(k_rows, token, is_token, k_token, piece, D, BLOCK_K)
                channel = piece + tl.arange(0, BLOCK_K)
                is_cell = (channel < D)[:, None] & (value < DV)[None, :]
                s = tl.load(before + channel[:, None] * DV, mask=is_cell, other=0.0)
                scores += exact_product(q_part, tl.trans(k_part))
                o += exact_product(q_part, s)
                q_square += tl.sum(q_part * q_part, 1)
                k_square += tl.sum(k_part * k_part, 1)
            scores = scores * shares(total, is_seen)
            if IS_DELTA:
                q_unit = tl.rsqrt(q_square + TINY) * scale
                scores = scores * q_unit[:, None] * tl.rsqrt(k_square + TINY)[None, :]
                o = o * q_unit[:, None]
            o = o * tl.exp2(total)
        o += exact_product(scores, amount)
        if not IS_DELTA:
            o += tl.load(constants + num_heads + head) * tl.load(v_at, mask=is_value, other=0.0).to(tl.float32)
        to = out + (token.to(tl.int64) * num_heads + head)[:, None] * DV + value[None, :]
        tl.store(to, rounded(o, out.dtype.element_ty), mask=is_value)
