import pytest
import torch

from gtpo_lightning.functional.groups import group_centered, lowest_rows, row_mean, sign_flips

NAN = float("nan")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(5))
def test_group_centered_equals_the_loops_in_any_row_order(dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(11, generator=generator, dtype=dtype)
    groups = torch.tensor([9, -4, 10**12])[torch.randint(0, 3, (11,), generator=generator)]
    valid = torch.rand(11, generator=generator) < 0.7
    expected = []
    for i in range(11):
        partners = [float(values[j]) for j in range(11) if groups[j] == groups[i] and valid[j]]
        expected.append(float(values[i]) - sum(partners) / len(partners) if valid[i] else 0.0)
    values[~valid] = NAN
    result = group_centered(values, groups, valid)
    assert result.dtype == dtype
    assert torch.allclose(result, torch.tensor(expected, dtype=dtype), atol=1e-6 if dtype == torch.float32 else 1e-14)


def test_group_centered_of_half_precision_is_fp32_and_a_group_of_one_is_zero():
    result = group_centered(
        torch.tensor([0.3, 0.5], dtype=torch.bfloat16), torch.tensor([1, 2]), torch.tensor([True] * 2)
    )
    assert result.dtype == torch.float32
    assert result.tolist() == [0, 0]


def test_group_centered_has_a_finite_gradient_where_a_group_is_empty():
    values = torch.tensor([1.0, NAN, 4.0], requires_grad=True)
    group_centered(values, torch.tensor([1, 2, 1]), torch.tensor([True, False, True]))[0].backward()
    assert values.grad.tolist() == [0.5, 0, -0.5]


def test_row_mean_counts_zero_weights_and_leaves_invalid_rows_out_of_value_and_gradient():
    values = torch.tensor([1.0, NAN, 4.0, 5.0], requires_grad=True)
    valid = torch.tensor([True, False, True, True])
    mean = row_mean(values, valid, weights=torch.tensor([1.0, 1.0, 0.5, 0.0]))
    assert float(mean.detach()) == pytest.approx(1.0, abs=1e-7)
    mean.backward()
    assert values.grad.tolist() == pytest.approx([1 / 3, 0, 1 / 6, 0], abs=1e-7)
    assert float(row_mean(values.detach(), valid)) == pytest.approx(10 / 3, abs=1e-6)
    assert float(row_mean(values.detach(), valid, denominator=2.5)) == pytest.approx(4.0, abs=1e-6)


def test_lowest_rows_of_every_share_equal_a_sort():
    values = [0.5, 0.1, -1.0, 0.5, 0.1, 0.9, 0.0]
    valid = [True, True, False, True, True, True, True]
    ranked = sorted((v, i) for i, (v, ok) in enumerate(zip(values, valid, strict=True)) if ok)
    for wanted in range(8):
        for share in (min(wanted / 7 + 1e-6, 1.0), min((wanted + 0.9) / 7, 1.0)):
            marked = lowest_rows(torch.tensor(values), torch.tensor(valid), share)
            assert marked.nonzero().flatten().tolist() == sorted(i for _, i in ranked[:wanted])


@pytest.mark.parametrize(("share", "rows", "expected"), [(0.29, 100, 29), (0.57, 100, 57), (0.1, 30, 3), (0.7, 10, 7)])
def test_lowest_rows_reads_the_share_as_the_decimal_it_is_written_as(share, rows, expected):
    assert int(lowest_rows(torch.rand(rows), torch.ones(rows, dtype=torch.bool), share).sum()) == expected


@pytest.mark.parametrize("share", [-0.1, 1.1, NAN])
def test_lowest_rows_refuses_a_share_outside(share):
    with pytest.raises(ValueError, match="share"):
        lowest_rows(torch.tensor([1.0]), torch.tensor([True]), share)


def test_sign_flips_over_a_grid():
    grid = [-2.0, -1.0, 0.0, 1.0, 2.0]
    for a in grid:
        for shift in grid:
            expected = (a > 0 and a + shift <= 0) or (a < 0 and a + shift >= 0)
            assert sign_flips(torch.tensor([a]), torch.tensor([shift])).tolist() == [expected]
