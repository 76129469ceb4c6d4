# SPDX-License-Identifier: Apache-2.0
"""Codes and scales of stored states: against torch's E4M3, written tables of E2M1 and E2M2, Model Optimizer's packing,
the definition of the searched scales, and at the ends of the float range. States are put in by restore and looked at in
the slot's bytes.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from trtllm_replayssm import MambaGeometry, ReplayConfig, SlotLayout, StatePool
from trtllm_replayssm.number_formats import E2M1, E2M2, E4M3

MODEL_OPTIMIZER = load_file(Path(__file__).parent / "data" / "modelopt_nvfp4.safetensors")
E2M1_TABLE = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M2_TABLE = [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0]
FP8_PAIRS = [("fp32", "fp8"), ("fp8_sr", "none")]
AMAX_PAIRS = [("fp32", "nvfp4_amax"), ("fp8_sr", "nvfp4_amax"), ("nvfp4", "none")]
SEARCHED_PAIRS = [("fp32", "nvfp4"), ("fp8_sr", "nvfp4"), ("fp32", "e2m2")]
BLOCK_PAIRS = [*AMAX_PAIRS, *SEARCHED_PAIRS]


def stored(device, state: torch.Tensor, checkpoint: str, read_copy: str):
    """The pool and a slot's bytes after `state` [H, P, N] was restored."""
    H, P, N = state.shape
    geometry = MambaGeometry(H, P, 1, N)
    pool = StatePool(geometry, ReplayConfig(8, 1, checkpoint, read_copy, "fp32"), 1, 1, device)
    pool.data.fill_(0xFF)
    tail = torch.zeros((1, 3, geometry.conv_channels), device=device)
    pool.restore(0, 0, state[None].contiguous().to(device), tail)
    return pool, pool.data[0, 0].cpu().numpy()


def parts(device, state, checkpoint, read_copy) -> dict[str, np.ndarray]:
    """Codes and scales of the copy, or of the checkpoint if there is no copy."""
    pool, blob = stored(device, state, checkpoint, read_copy)
    name = "checkpoint" if read_copy == "none" else "read_copy"
    arrays = pool.layout.unpack(blob)
    return {key.removeprefix(f"{name}."): array for key, array in arrays.items() if key.startswith(f"{name}.")}


def decoded(device, state, checkpoint, read_copy) -> np.ndarray:
    """What steps read."""
    pool, blob = stored(device, state, checkpoint, read_copy)
    return pool.layout.state(blob, "checkpoint" if read_copy == "none" else "read_copy")


def test_tables():
    exact = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(E4M3, exact)
    np.testing.assert_array_equal(E2M1, [*E2M1_TABLE, *(-value for value in E2M1_TABLE)])
    np.testing.assert_array_equal(E2M2, [*E2M2_TABLE, *(-value for value in E2M2_TABLE)])


def neighbours(values: np.ndarray) -> np.ndarray:
    """`values` and the float32 numbers beside them, of both signs."""
    values = values.astype(np.float32)
    near = np.concatenate([np.nextafter(values, np.float32(0)), values, np.nextafter(values, np.float32(np.inf))])
    return np.concatenate([near, -near])


def rows_of(values: np.ndarray, largest: float, columns=128) -> np.ndarray:
    """`values` in rows of `columns`, each opened by `largest`, and padded with it to a multiple of 8 rows."""
    per_row = columns - 1
    count = -(-len(values) // (8 * per_row)) * 8
    rows = np.full((count, columns), largest, np.float32)
    padded = np.full(count * per_row, largest, np.float32)
    padded[: len(values)] = values
    rows[:, 1:] = padded.reshape(count, per_row)
    return rows


def test_e4m3_is_torch_float8_e4m3fn(device):
    """Every code, every tie between two codes and the floats beside them, subnormals, and random magnitudes."""
    codes = E4M3[:0x7F].astype(np.float64)
    rng = np.random.default_rng(0)
    random = np.exp2(rng.uniform(-14, 8.8, 20_000)) * rng.choice([-1, 1], 20_000)
    edges = np.concatenate([codes, (codes[1:] + codes[:-1]) / 2])
    values = np.concatenate([neighbours(edges), random.astype(np.float32), [0.0, -0.0]])
    values = values[np.abs(values) <= 448]
    rows = rows_of(values, 448.0)  # a row scale of 1
    state = torch.from_numpy(rows).reshape(-1, 8, 128)
    arrays = parts(device, state, "fp32", "fp8")
    np.testing.assert_array_equal(arrays["row_scales"], 1.0)
    expected = state.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(arrays["codes"], expected)
    assert set(expected.ravel()) == set(range(256)) - {0x7F, 0xFF}


def nearest_code(values: np.ndarray, table: list[float]) -> np.ndarray:
    """By the definition: the nearest value of the table, the even code of two; below zero as many more as it has."""
    distance = np.abs(np.abs(values.astype(np.float64))[..., None] - table)
    codes = np.arange(len(table))
    preferred = np.concatenate([codes[::2], codes[1::2]])  # argmin takes the first of equals: even codes first
    return preferred[distance[..., preferred].argmin(-1)] + len(table) * (values < 0)


def test_e2m1_is_the_nearest_of_the_table(device):
    rng = np.random.default_rng(0)
    table = np.array(E2M1_TABLE)
    edges = np.concatenate([table, (table[1:] + table[:-1]) / 2])
    values = np.concatenate([neighbours(edges), rng.uniform(-6, 6, 20_000), [0.0, -0.0]]).astype(np.float32)
    values = values[np.abs(values) <= 6]
    rows = rows_of(values, 6.0, 16)  # a block scale of 1 ...
    rows = np.concatenate([rows, np.full((-len(rows) % 64, 16), 6.0, np.float32)]).reshape(-1, 8, 128)
    rows[:, 7, 112:] = 2688.0  # ... and a head scale of 1
    arrays = parts(device, torch.from_numpy(rows), "fp32", "nvfp4_amax")
    np.testing.assert_array_equal(arrays["head_scale"], 1.0)
    np.testing.assert_array_equal(np.delete(arrays["block_scales"].reshape(len(rows), -1), 63, 1), 0x38)
    codes = np.stack([arrays["codes"] & 15, arrays["codes"] >> 4], -1).reshape(rows.shape)
    expected = nearest_code(rows, E2M1_TABLE)
    expected[:, 7, 112:] = 7
    np.testing.assert_array_equal(codes, expected)
    assert set(codes.ravel()) == set(range(16))


@pytest.mark.parametrize("checkpoint, read_copy", AMAX_PAIRS)
def test_nvfp4_amax_is_what_model_optimizer_packs(device, checkpoint, read_copy):
    """Bytes of codes and scales, and values bit for bit (the file says with which versions)."""
    arrays = parts(device, MODEL_OPTIMIZER["state"], checkpoint, read_copy)
    for name in ("codes", "block_scales", "head_scale"):
        np.testing.assert_array_equal(arrays[name], MODEL_OPTIMIZER[name].numpy(), err_msg=name)
    read = decoded(device, MODEL_OPTIMIZER["state"], checkpoint, read_copy)
    steps = MODEL_OPTIMIZER["block_scales"].view(torch.float8_e4m3fn).float()
    steps = steps * MODEL_OPTIMIZER["head_scale"][:, None, None]
    codes = torch.stack([MODEL_OPTIMIZER["codes"] & 15, MODEL_OPTIMIZER["codes"] >> 4], -1).flatten(-2).long()
    values = torch.tensor([*E2M1_TABLE, *(-value for value in E2M1_TABLE)])[codes]
    np.testing.assert_array_equal(read, (values.unflatten(-1, (-1, 16)) * steps[..., None]).flatten(-2).numpy())


# ---- searched scales -------------------------------------------------------------------------------------------------


def e4m3(values: np.ndarray) -> np.ndarray:
    """Rounded to E4M3 by torch."""
    return torch.from_numpy(values).to(torch.float8_e4m3fn).float().numpy()


def coded(u: np.ndarray, s: np.ndarray, table) -> tuple[np.ndarray, np.ndarray]:
    """Indices into `table` of blocks |u| [.., 16] by scales s [..], half up, and their distances; in units of codes."""
    ratio = np.abs(u) * (np.float32(2.0**-5) / s).astype(np.float16)[..., None]  # 2^-14 codes
    values, ratio = np.array(table, np.float64), ratio.astype(np.float64) * 2.0**14
    codes = np.searchsorted((values[1:] + values[:-1]) / 2, ratio, side="right")
    return codes, ratio - values[codes]


def three_scales(u: np.ndarray, amax: np.ndarray) -> list[tuple]:
    """What "nvfp4" tries of blocks u [.., 16]: scales, codes and squared errors, but for what all have in common."""

    def nearest(s):  # half up
        return ((s.view(np.uint32) + 0x80000) & 0xFFF00000).astype(np.uint32).view(np.float32)

    def beside(s, steps):
        return (s.view(np.int32) + (steps << 20)).astype(np.int32).view(np.float32)

    first = nearest(amax * np.float32(512 / 6))
    significand, exponent = np.frexp(beside(first, 1))
    factor = np.ldexp(1.0, np.where(16 * significand < 11, 15, 14) - exponent)
    level = np.rint(np.abs(u) * factor[..., None].astype(np.float64))
    assert level.max() < 256

    def tried(s):
        assert (e4m3(s) == s).all()
        codes, _ = coded(u, s, E2M1_TABLE)
        q, m = 2 * np.array(E2M1_TABLE)[codes], s * factor / 1024
        assert (m == np.rint(m)).all()
        rest = (q * (level - m[..., None] * q)).sum(-1)  # above 0: codes are too small as a whole
        return (s, codes, np.square(m[..., None] * q - level).sum(-1)), rest

    one, rest = tried(first)
    larger = (rest > 0) | ~(amax * np.float32(512 / 6.875) < beside(first, -1))
    wide = np.minimum(nearest(amax * np.float32(128)), np.float32(448))
    return [one, tried(np.where(larger, beside(first, 1), beside(first, -1)))[0], tried(wide)[0]]


def four_scales(u: np.ndarray, amax: np.ndarray) -> list[tuple]:
    """What "e2m2" tries."""
    scales = [e4m3(amax * (np.float32(512) / np.float32(divisor))) for divisor in (7.0, 6.5, 7.5, 6.0)]
    result = []
    for s in scales:
        codes, distance = coded(u, s, E2M2_TABLE)
        squares = np.square(distance).reshape(*s.shape, 4, 2, 2)
        sums = np.zeros((2, *s.shape), np.float16)
        for part in (0, 1):
            for column in np.moveaxis(squares[..., part, :].reshape(*s.shape, 8), -1, 0):
                sums[part] = (sums[part].astype(np.float64) + column).astype(np.float16)
        result.append((s, codes, (sums[0].astype(np.float32) + sums[1].astype(np.float32)) * s * s))
    return result


def searched(state: np.ndarray, kind: str) -> dict[str, np.ndarray]:
    """What the definition of a read copy "nvfp4" or "e2m2" makes of heads [H, P, N], in operations of the precisions
    that it names: codes [H, P, N] and scales as numbers. `winner` [H, P, N/16] tells which scale won.
    """
    table, attempt, largest_divisor, head_divisor, columns = {
        "nvfp4": (E2M1_TABLE, three_scales, 6.5, 1536.0, True),
        "e2m2": (E2M2_TABLE, four_scales, 7.5, 2464.0, False),
    }[kind]
    H, P, N = state.shape
    one = np.float32(1)
    amax = np.abs(state).max((1, 2), keepdims=True)
    g = amax / np.float32(head_divisor)
    live = g > 0
    with np.errstate(all="ignore"):
        c = np.ones((H, 1, N), np.float32)
        if columns:
            c = e4m3(np.maximum(np.sqrt(np.abs(state).max(1, keepdims=True) / amax), np.float32(2.0**-6)))
        lift = np.where(g < 2.0**-64, np.float32(2.0**64), one)
        inverse = (one / c) * (one / (g * lift * np.float32(512)))
        u = np.where(live, state * lift * inverse, 0).astype(np.float16).reshape(H, P, N // 16, 16)
    block_amax = np.maximum(np.abs(u).max(-1).astype(np.float32), np.float32(2.0**-15 * largest_divisor))
    tried = attempt(u, block_amax)
    others = np.where(amax < 2.0**127, [error for *_, error in tried[1:]], np.inf)
    winner = np.argmin([tried[0][2], *others], 0)
    s = np.choose(winner, [s for s, *_ in tried])
    codes = np.choose(winner[..., None], [codes for _, codes, _ in tried]) + len(table) * np.signbit(u)
    codes = np.where(live, codes.reshape(H, P, N), 0)
    made = {"codes": codes, "block_scales": np.where(live, s, 0), "head_scale": g[:, 0, 0], "winner": winner}
    return made | ({"column_scales": np.where(live, c, 0)[:, 0]} if columns else {})


def random_heads(seed: int, H=4, P=16, N=128) -> np.ndarray:
    """Sums of outer products whose columns differ in size, as those of trained models do."""
    rng = np.random.default_rng(seed)
    x, B = rng.standard_normal((H, 40, P)), rng.standard_normal((H, 40, N)) * np.exp(rng.normal(0, 0.5, (H, 1, N)))
    return np.einsum("htp,htn,t->hpn", x, B, np.exp(-np.arange(40) / 20)).astype(np.float32)


def extreme_heads() -> np.ndarray:
    """Heads of any size, columns and blocks far below the rest, zeros, and ties between codes."""
    rng = np.random.default_rng(1)
    heads = random_heads(1, 13)
    heads[0, :, 16:48] *= 1e-9
    heads[0, :, 5], heads[0, 3, 64:80], heads[0, 4] = 0, 0, 0
    heads[1:4] = rng.integers(-28, 29, (3, 16, 128)) / 4  # 7 = 28 / 4, and head scales that are powers of two
    heads[1, 0, 0], heads[2, 0, 0], heads[3] = 1536, 2464, heads[3].clip(-6, 6)
    heads[3, 0] = 1536
    heads[4] = 0
    heads[5] = -0.0
    for index, size in enumerate((1e-45, 1e-42, 1e-39, 1e38, 1.6e38, float(np.finfo(np.float32).max), 3e-42)):
        heads[6 + index] *= np.float64(size) / np.abs(heads[6 + index]).max()
    return heads


@pytest.mark.parametrize("heads", [random_heads, extreme_heads])
@pytest.mark.parametrize("kind", ["nvfp4", "e2m2"])
def test_searched_scales_are_the_definitions(device, kind, heads):
    """Every code and scale, and values bit for bit; all scales and codes occur."""
    state = heads() if heads is extreme_heads else np.concatenate([heads(2), heads(3)])
    arrays, expected = parts(device, torch.from_numpy(state), "fp32", kind), searched(state, kind)
    table = E2M1_TABLE if kind == "nvfp4" else E2M2_TABLE
    codes = np.stack([arrays["codes"] & 15, arrays["codes"] >> 4], -1).reshape(state.shape).astype(int)
    if kind == "e2m2":
        low = arrays["low_bits"][..., None] >> np.arange(16) & 1
        codes = codes << 1 | low.reshape(state.shape)
    np.testing.assert_array_equal(arrays["head_scale"], expected["head_scale"])
    np.testing.assert_array_equal(E4M3[arrays["block_scales"]], expected["block_scales"])
    np.testing.assert_array_equal(codes, expected["codes"])
    steps = expected["block_scales"] * expected["head_scale"][:, None, None]
    values = np.array([*table, *(-value for value in table)], np.float32)[codes] * steps.repeat(16, -1)
    if kind == "nvfp4":
        np.testing.assert_array_equal(E4M3[arrays["column_scales"]], expected["column_scales"])
        values = values * expected["column_scales"][:, None]
    np.testing.assert_array_equal(decoded(device, torch.from_numpy(state), "fp32", kind), values)
    assert np.unique(expected["winner"]).tolist() == list(range(3 if kind == "nvfp4" else 4))
    assert np.unique(codes).tolist() == list(range(2 * len(table)))


def test_searched_copies_are_closer(device):
    """Mean squared errors next to nvfp4_amax's. The sizes of columns differ about as much as in the states of the
    checkpoint in examples/ (a standard deviation of the logarithm of their amax of 0.6).
    """
    state = random_heads(0, 8, 64)
    errors = {}
    for kind in ("nvfp4_amax", "nvfp4", "e2m2"):
        difference = decoded(device, torch.from_numpy(state), "fp32", kind).astype(np.float64) - state
        errors[kind] = (np.square(difference).sum((1, 2)) / np.square(state.astype(np.float64)).sum((1, 2))).mean()
    assert errors["nvfp4_amax"] == pytest.approx(0.00846, rel=0.01)
    assert errors["nvfp4_amax"] / errors["nvfp4"] == pytest.approx(1.46, rel=0.01)
    assert errors["nvfp4_amax"] / errors["e2m2"] == pytest.approx(4.90, rel=0.01)


def test_chunks_of_every_format():
    """Sizes by hand, and parts that share the slot's memory."""
    geometry = MambaGeometry(num_heads=3, head_dim=8, num_groups=1, state_dim=64)
    for checkpoint, read_copy, chunk, copy in (
        ("fp32", "nvfp4_amax", 8 * 64 * 4, 8 * 32 + 8 * 4 + 16),
        ("fp16", "e2m2", 8 * 64 * 2, 8 * 32 + 8 * 8 + 8 * 4 + 16),
        ("fp16_sr", "fp8", 8 * 64 * 2, 8 * 64 + 8 * 4),
        ("fp8_sr", "nvfp4", 8 * 64 + 8 * 4, 8 * 32 + 8 * 4 + 64 + 16),
        ("nvfp4", "none", 8 * 32 + 8 * 4 + 16, 0),
    ):
        layout = SlotLayout(geometry, ReplayConfig(8, 1, checkpoint, read_copy))
        sections = layout.sections
        assert sections["checkpoint"].bytes == 3 * chunk
        assert ("read_copy" in sections) == (copy > 0)
        if copy:
            assert sections["read_copy"].bytes == 3 * copy
            assert sections["read_copy"].offset == -(-3 * chunk // 256) * 256
        blob = np.zeros(layout.slot_stride, np.uint8)
        arrays = layout.unpack(blob)
        for name, array in arrays.items():
            array.reshape(-1, *array.shape[-1:])[-1:] = 1
            assert np.shares_memory(array, blob), name
    head_scale = sections["checkpoint"].offset + 2 * chunk + 8 * 32 + 8 * 4
    assert blob[head_scale : head_scale + 4].view(np.float32) == 1.0
    with pytest.raises(ValueError, match='name: expected "checkpoint" or, with a read copy, "read_copy"'):
        layout.state(blob, "read_copy")


# ---- the ends of the range -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "amax", [1e-45, 3e-45, 1e-42, 1e-39, 1e-37, 1e-20, 1.0, 1e20, 1e38, float(np.finfo(np.float32).max)]
)
@pytest.mark.parametrize("checkpoint, read_copy", [("fp32", "none"), *FP8_PAIRS, *BLOCK_PAIRS])
def test_heads_of_any_size(device, checkpoint, read_copy, amax):
    """Errors within the formats' bounds, where scales are subnormal too; no NaN and no infinity arises."""
    values = np.random.default_rng(0).uniform(-1, 1, (2, 8, 64)).astype(np.float32)
    values[:, 0, 0] = 1.0
    state = values * np.float32(amax)
    state[1, 3] = 0.0
    pool, _ = stored(device, torch.from_numpy(state), checkpoint, read_copy)
    pool.validate()
    read = decoded(device, torch.from_numpy(state), checkpoint, read_copy).astype(np.float64)
    assert np.isfinite(read).all()
    assert not read[1, 3].any()
    error = np.abs(read - state)
    smallest = 2.0**-149  # the spacing of subnormal floats, in which scales and values are rounded
    if (checkpoint, read_copy) in FP8_PAIRS:
        rows = np.abs(state.astype(np.float64)).max(-1, keepdims=True)
        step = 2.0**-3 if checkpoint == "fp8_sr" else 2.0**-4  # a step of the mantissa, or half of it
        bound = np.maximum(np.abs(state) * step, rows / 448 * 2.0**-9) * 1.001 + 448 * smallest
    elif (checkpoint, read_copy) in AMAX_PAIRS:
        # The widest half step is 1 of 6; block scales are off by 2^-4 at most, or by 2^-9 of the head's largest.
        blocks = np.abs(state.astype(np.float64)).reshape(2, 8, 4, 16).max(-1).repeat(16, -1)
        bound = blocks / 6 * (1 + 2.0**-4) + amax / 448 * 2.0**-9 + 2688 * smallest
    elif (checkpoint, read_copy) in SEARCHED_PAIRS:
        # Half steps of 1 by a scale that is one larger, or saturation at 7 of what was to be 7.5. Scales are off by
        # 2^-4 at most, or by 2^-9 of the head's.
        divisor, room, columns = (16 / 3, 1536, 1.0) if read_copy == "nvfp4" else (8.8, 2464, 1.0)
        if read_copy == "nvfp4":
            scales = E4M3[parts(device, torch.from_numpy(state), checkpoint, read_copy)["column_scales"]]
            columns = np.where(scales > 0, scales, 1.0).astype(np.float64)[:, None]
        blocks = (np.abs(state.astype(np.float64)) / columns).reshape(2, 8, 4, 16).max(-1).repeat(16, -1) * columns
        bound = blocks / divisor * (1 + 2.0**-4) + amax / room * 2.0**-9 + 2688 * smallest
    else:
        bound = 0.0
    assert (error <= bound).all()


@pytest.mark.parametrize("checkpoint, read_copy", [*FP8_PAIRS, *BLOCK_PAIRS])
def test_zeros_are_zeros(device, checkpoint, read_copy):
    """An all-zero head, and negative zeros: codes and scales 0 and no NaN."""
    state = torch.zeros((2, 8, 64))
    state[1] = -0.0
    arrays = parts(device, state, checkpoint, read_copy)
    for name in ("row_scales", "block_scales", "column_scales", "head_scale"):
        assert not arrays.get(name, np.zeros(1)).any()
    assert not decoded(device, state, checkpoint, read_copy).any()
    pool, blob = stored(device, state, checkpoint, read_copy)
    pool.validate()
    if (checkpoint, read_copy) in BLOCK_PAIRS:  # the padding after the head scale, too
        section = pool.layout.sections["checkpoint" if read_copy == "none" else "read_copy"]
        assert not blob[section.offset : section.offset + section.bytes].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("checkpoint, read_copy", [("fp16_sr", "none"), ("fp16_sr", "fp8"), *FP8_PAIRS, *BLOCK_PAIRS])
def test_what_is_not_finite_stays_so(device, checkpoint, read_copy, bad):
    """A NaN or an infinity is never clamped: its row (FP8) or head (NVFP4, E2M2) reads as NaN, the others as before."""
    good = torch.randn((3, 8, 64), generator=torch.Generator().manual_seed(0))
    state = good.clone()
    state[1, 2, 5] = bad
    pool, blob = stored(device, state, checkpoint, read_copy)
    fine, fine_blob = stored(device, good, checkpoint, read_copy)
    with pytest.raises(ValueError, match="row 0: the state of head 1 in layer 0 was stored with a NaN or an infinity"):
        pool.validate()
    pool.validate()  # told once
    fine.validate()
    for name, kind in (("checkpoint", checkpoint), ("read_copy", read_copy)):
        if kind == "none":
            continue
        read, expected = pool.layout.state(blob, name), fine.layout.state(fine_blob, name)
        plain, rows = kind in ("fp32", "fp16_sr"), kind in ("fp8", "fp8_sr")
        touched = np.s_[1, 2, 5] if plain else np.s_[1, 2] if rows else np.s_[1]
        if plain:
            np.testing.assert_array_equal(read[touched], bad)
        else:
            assert np.isnan(read[touched]).all()
        read[touched] = expected[touched]
        np.testing.assert_array_equal(read, expected)


@pytest.mark.parametrize("checkpoint", ["fp16", "fp16_sr"])
def test_overflow_of_fp16_is_infinite_and_reported(device, checkpoint):
    state = torch.full((2, 8, 64), 65504.0)
    pool, _ = stored(device, state, checkpoint, "none")
    pool.validate()
    state[1, 7, 63] = -65536.0
    pool, blob = stored(device, state, checkpoint, "none")
    read = pool.layout.state(blob)
    assert read[1, 7, 63] == -np.inf and np.isfinite(read).sum() == read.size - 1
    with pytest.raises(ValueError, match="the state of head 1 in layer 0 was stored"):
        pool.validate()
