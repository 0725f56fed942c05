"""Construction of Hadamard matrices, and the native transform against its numpy reading copy and a dense product."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.linalg import hadamard as sylvester

from tests.oracles.hadamard import paley_of_prime
from tqtool.errors import BackendError, NumericalError, UserError
from tqtool.mathx.hadamard import hadamard_factor, hadamard_matrix, reference_transform, require_size, split_size
from tqtool.mathx.paley import _character_matrix, paley_matrix, paley_order_field, prime_power, require_orthogonal
from tqtool.native import hadamard_transform

ORDERS = [order for order in range(4, 261, 4) if paley_order_field(order) is not None]


# --------------------------------------------------------------------------------------------- construction
def test_the_orders_a_model_needs_are_there() -> None:
    assert {12, 20, 28, 36, 44, 52, 60, 68, 84, 108, 180, 76, 100, 124, 140, 148, 164, 244} <= set(ORDERS)


@pytest.mark.parametrize("order", ORDERS)
def test_orthogonal_in_integers(order: int) -> None:
    matrix = paley_matrix(order).astype(np.int64)
    assert set(np.unique(matrix)) == {-1, 1}
    assert np.array_equal(matrix @ matrix.T, order * np.eye(order, dtype=np.int64))
    assert np.array_equal(matrix.T @ matrix, order * np.eye(order, dtype=np.int64))


@pytest.mark.parametrize(("order", "p"), [(12, 11), (20, 19), (36, 17), (44, 43), (60, 59), (68, 67), (76, 37)])
def test_prime_fields_equal_the_entrywise_definition(order: int, p: int) -> None:
    assert np.array_equal(paley_matrix(order), paley_of_prime(order, p))


@pytest.mark.parametrize("q", [9, 25, 27, 49, 81, 121, 125, 243])
def test_prime_power_fields_have_a_true_character(q: int) -> None:
    # What the construction rests on: Q Qᵀ = q I - J, zero row sums, symmetry (q ≡ 1) or skew symmetry (q ≡ 3 mod 4).
    character = _character_matrix(q).astype(np.int64)
    assert np.array_equal(character @ character.T, q * np.eye(q, dtype=np.int64) - 1)
    assert not character.sum(axis=1).any()
    assert np.array_equal(character, (-1 if q % 4 == 3 else 1) * character.T)


def test_prime_powers() -> None:
    found = {q: prime_power(q) for q in (1, 2, 9, 12, 27, 49, 97, 121, 2187, 2189)}
    assert found == {
        1: None, 2: (2, 1), 9: (3, 2), 12: None, 27: (3, 3), 49: (7, 2), 97: (97, 1), 121: (11, 2), 2187: (3, 7),
        2189: None,
    }  # fmt: skip


def test_a_matrix_with_one_wrong_sign_is_caught() -> None:
    matrix = paley_matrix(12)
    matrix[3, 5] *= -1
    with pytest.raises(NumericalError, match="order 12"):
        require_orthogonal(matrix)


@pytest.mark.parametrize(
    ("n", "m"),
    [(1, 1), (2, 1), (4096, 1), (12, 12), (24, 12), (80, 20), (96, 12), (576, 36), (640, 20), (896, 28), (1152, 36),
     (1536, 12), (2560, 20), (3072, 12), (3584, 28), (4864, 76), (5120, 20), (17408, 68), (5888, 368), (1856, 464)],
)  # fmt: skip
def test_the_smallest_factor_is_chosen(n: int, m: int) -> None:
    found = require_size(n, what="n")
    assert found == (m, (n // m).bit_length() - 1)
    odd = n // (n & -n)
    assert not [s for s in ORDERS if s < m and n % s == 0 and s % odd == 0 and odd > 1]


def test_every_size_splits_or_is_refused_with_the_nearest() -> None:
    for n in range(1, 600):
        found = split_size(n)
        if found is not None:
            assert found[0] << found[1] == n
            continue
        with pytest.raises(UserError, match=f"hidden_size {n}: no Hadamard matrix") as refusal:
            require_size(n, what="hidden_size")
        assert refusal.value.hint is not None
        nearest = [int(word.strip(";,")) for word in refusal.value.hint.split() if word.strip(";,").isdigit()]
        assert nearest
        assert all(split_size(size) for size in nearest)


def test_the_refusal_names_the_factor_it_would_take() -> None:
    with pytest.raises(UserError, match=r"hidden_size 92: .*92 = 23·2\^2.* is 368") as refusal:
        require_size(92, what="hidden_size")
    assert "88 and 96" in str(refusal.value.hint)
    with pytest.raises(UserError, match="above the largest factor 1024"):
        require_size(59 * 1024, what="hidden_size")
    with pytest.raises(UserError, match="positive"):
        require_size(0, what="hidden_size")


def test_powers_of_two_are_sylvester_in_natural_order() -> None:
    for n in (1, 2, 8, 64):
        assert np.array_equal(hadamard_matrix(n), sylvester(n))


def test_the_factor_is_outermost() -> None:
    assert np.array_equal(hadamard_matrix(48), np.kron(hadamard_factor(12), sylvester(4)))
    assert not np.array_equal(hadamard_factor(12), hadamard_factor(12).T)


# ------------------------------------------------------------------------------------------------ transform
SIZES = [1, 2, 4, 12, 20, 28, 36, 64, 80, 96, 512, 576, 896, 1536, 2048, 5120, 17408]


def _case(n: int, rows: int, dtype: type) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(n * 1000 + rows)
    return rng.standard_t(3, (rows, n)).astype(dtype), rng.choice([-1.0, 1.0], n).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", SIZES)
def test_native_has_the_bits_of_the_reference(n: int, dtype: type) -> None:
    factor = hadamard_factor(require_size(n, what="n")[0])
    for rows in (1, 7, 16, 37) if n <= 2048 else (1, 19):
        x, scale = _case(n, rows, dtype)
        expected = reference_transform(x, factor, scale)
        columns = np.ascontiguousarray(x.T)
        for threads in (1, 2, 5):
            by_rows = hadamard_transform(x, axis=1, scale=scale, threads=threads)
            by_columns = hadamard_transform(columns, axis=0, scale=scale, threads=threads)
            assert by_rows.tobytes() == expected.tobytes()
            assert np.ascontiguousarray(by_columns.T).tobytes() == expected.tobytes()


@pytest.mark.parametrize("force", ["scalar", "avx2", "avx512"])
def test_every_instruction_set_gives_the_same_bits(force: str) -> None:
    for n in (36, 576, 1024, 5120):
        x, scale = _case(n, 21, np.float32)
        expected = reference_transform(x, hadamard_factor(require_size(n, what="n")[0]), scale)
        try:
            result = hadamard_transform(x, axis=1, scale=scale, force=force)
        except BackendError as error:
            pytest.skip(str(error))
        assert result.tobytes() == expected.tobytes()


@pytest.mark.parametrize("n", [1, 2, 12, 36, 80, 96, 576])
def test_equal_to_the_dense_product(n: int) -> None:
    x, scale = _case(n, 11, np.float64)
    dense = (x * scale) @ hadamard_matrix(n).astype(np.float64) / math.sqrt(n)
    # n products of size |x|: rounding of either side stays below n · 2^-53 · Σ|x| / sqrt(n).
    bound = n * 2.0**-53 * np.abs(x).sum(axis=1).max() / math.sqrt(n)
    assert np.abs(hadamard_transform(x, axis=1, scale=scale) - dense).max() <= bound


@pytest.mark.parametrize("n", [12, 20, 36, 64, 576, 896])
def test_the_transpose_is_the_inverse(n: int) -> None:
    x, _ = _case(n, 5, np.float64)
    back = hadamard_transform(hadamard_transform(x, axis=1), axis=1, transpose=True)
    assert np.abs(back - x).max() <= 4 * n * 2.0**-53 * np.abs(x).max()
    if n in (12, 20, 896):  # Paley I is not symmetric; Paley II (36) and Sylvester are, and are their own inverse
        assert np.abs(hadamard_transform(hadamard_transform(x, axis=1), axis=1) - x).max() > 0.1


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_blocks_along_any_axis(axis: int) -> None:
    x = np.random.default_rng(5).standard_normal((24, 36, 48)).astype(np.float32)
    moved = np.moveaxis(x, axis, -1)
    cut = np.ascontiguousarray(moved).reshape(*moved.shape[:-1], -1, 12)
    expected = np.moveaxis(reference_transform(cut, hadamard_factor(12)).reshape(moved.shape), -1, axis)
    assert np.array_equal(hadamard_transform(x, axis=axis, block=12), expected)


def test_in_place_and_out_equal_a_new_array() -> None:
    x, scale = _case(896, 33, np.float32)
    before, expected = x.copy(), hadamard_transform(x, axis=1, scale=scale)
    assert np.array_equal(x, before)
    out = np.empty_like(x)
    assert hadamard_transform(x, axis=1, scale=scale, out=out) is out
    hadamard_transform(x, axis=1, scale=scale, out=x)
    assert np.array_equal(out, expected)
    assert np.array_equal(x, expected)


def test_a_vector_and_an_empty_array() -> None:
    x = np.random.default_rng(6).standard_normal(36)
    assert np.allclose(hadamard_transform(x, axis=0), x @ hadamard_matrix(36) / 6, rtol=0, atol=1e-14)
    assert hadamard_transform(np.empty((0, 36), np.float32), axis=1).shape == (0, 36)


def test_what_does_not_fit_is_refused() -> None:
    x = np.zeros((4, 24), np.float32)
    with pytest.raises(BackendError, match="cannot be cut into blocks of 20"):
        hadamard_transform(x, axis=1, block=20)
    with pytest.raises(UserError, match="transform size 23"):
        hadamard_transform(np.zeros((4, 23), np.float32), axis=1)
    for wrong in (x.T, x.astype(np.float16), x.astype(np.int32)):
        with pytest.raises(BackendError, match="hadamard_transform"):
            hadamard_transform(wrong, axis=0)  # type: ignore[type-var]
    with pytest.raises(BackendError, match="scale"):
        hadamard_transform(x, axis=1, scale=np.ones(23, np.float32))
    with pytest.raises(BackendError):
        hadamard_transform(x, axis=1, scale=np.ones(24, np.float64))
    with pytest.raises(BackendError, match="x, y"):
        hadamard_transform(x, axis=1, out=np.empty((4, 12), np.float32))
