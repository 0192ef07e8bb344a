"""The comparison of formulas in the worker, called here in this process: on formulas that end."""

import cmath
import importlib.util
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gtpo_lightning.rewards import math_verify_equal
from gtpo_lightning.rewards.formulas import read
from gtpo_lightning.rewards.math_verify_equal import equal

SAME = [
    # Numbers.
    (r"\frac{1}{2}", "0.5"),
    ("1/2^99", "2^{-99}"),
    ("2(3)", "6"),
    (r"\frac12\cdot 4", "2"),
    (r"\frac 7 9", "7/9"),
    (r"\frac{100!}{98!}", "9900"),
    (r"\frac{10!}{3!7!}", "120"),
    (r"\binom{10}{3}", "120"),
    (r"\log_28", "3"),
    (r"\log_{\sqrt2} 4", "4"),
    (r"\log_10 1000", r"\log 1000"),
    (r"\ln e^5", "5"),
    (r"\sqrt[3]{-2}", r"-\sqrt[3]{2}"),
    (r"(-8)^{1/3}", "-2"),
    (r"\sqrt{7+4\sqrt{3}}", r"2+\sqrt{3}"),
    (r"\frac{\sqrt{6}+\sqrt{2}}{4}", r"\cos 15^\circ"),
    (r"\arcsin 1", r"\frac{\pi}{2}"),
    (r"\tan^{-1}(1)", r"\pi/4"),
    (r"\sinh 1", r"\frac{e-e^{-1}}{2}"),
    (r"\lceil \pi \rceil", "4"),
    (r"\left|-5\right|", "5"),
    (r"\sin\pi", "0"),
    (r"1+(\sin(\sin\pi))^2", r"\cos 0"),
    (r"\lfloor \log_{10} 1000 \rfloor", "3"),
    # Complex numbers.
    (r"e^{i\pi}", "-1"),
    (r"\frac{1}{i}", "-i"),
    ("(1+i)^2", "2i"),
    (r"\cos\theta+i\sin\theta", r"e^{i\theta}"),
    # Functions.
    (r"\sin^2 x+\cos^2 x", "1"),
    (r"2\sin x\cos x", r"\sin 2x"),
    (r"\frac{x^2-1}{x-1}", "x+1"),
    (r"\sqrt{x^2}", "|x|"),
    (r"\sqrt{x^3}", r"x\sqrt{x}"),
    (r"\sqrt{x}", "x^{1/2}"),
    (r"\sqrt[3]{x^3}", "x"),
    ("1/2x", r"\frac{x}{2}"),
    ("a(b+c)", "ab+ac"),
    ("2ABb", "2bAB"),
    (r"\frac{n!}{(n-2)!}", "n(n-1)"),
    (r"\binom{n}{2}", r"\frac{n(n-1)}{2}"),
    ("(-1)^n n", "n(-1)^n"),
    ("x_1+x_{12}", "x_{12}+x_1"),
    ("|x-5|", "|5-x|"),
    # Equations and inequalities.
    ("2x+y=5", "y=5-2x"),
    ("2x+3y-z=5", "4x+6y-2z=10"),
    (r"\frac{x^2}{4}+\frac{y^2}{9}=1", "9x^2+4y^2=36"),
    ("x>5", "5<x"),
    ("2x<4", "x<2"),
    ("-2x<4", "x>-2"),
    (r"1<x\le 5", r"10\ge 2x>2"),
    (r"x \neq 3", r"3\ne x"),
]

OTHER = [
    ("1/2^99", "1/2^98"),
    (r"0.333\pi", r"\frac{\pi}{3}"),
    (r"0.33333333333333333333333333333333333\pi", r"\frac{\pi}{3}"),
    ("0.333333", "1/3"),
    ("2.718281828459045", "e"),
    (r"\sqrt{2}+10^{-200}", r"\sqrt{2}"),
    (r"\sin 1+10^{-40}", r"\sin 1"),
    (r"\cos(10^{-30})", "1"),
    ("1+e^{-300}", "1"),
    (r"\tanh(300)", "1"),
    (r"e^{\pi\sqrt{163}}", "262537412640768744"),
    (r"\ln 2", r"\log 2"),
    ("5", "-5"),
    ("i", "-i"),
    ("2+3i", "3+2i"),
    (r"\sqrt{-4}", "2"),
    ("x", "y"),
    ("X+1", "x+1"),
    ("x'", "x"),
    ("2m", "2"),
    (r"\frac12s", r"\frac12"),
    (r"\text{13}", "13.0"),
    (r"\sqrt{x^2}", "x"),
    (r"2\ln x", r"\ln x^2"),
    (r"\sqrt{x}\sqrt{y}", r"\sqrt{xy}"),
    ("|x|", "x"),
    ("|x-5|", "x-5"),
    ("|x^2+1|", "x^2+1"),  # the same, but g = 0 was never crossed
    (r"\lfloor x \rfloor", "x"),
    (r"\lfloor x+1 \rfloor", r"\lfloor x \rfloor+1"),  # the same, but jumps are never all seen
    ("(-1)^{2n}", "1"),  # the same for integers only
    (r"x^{23}", r"x^{2}\cdot 3"),
    ("2(3)", "5"),
    (r"2\frac{1}{2}", "1"),
    (r"2\frac{1}{2}", "5/2"),
    ("a/bc", "ac/b"),
    ("a/bc", r"\frac{a}{bc}"),
    (r"\sin x/2", r"\frac{\sin x}{2}"),
    (r"\sin(x)^2", r"\sin^2 x"),
    (r"\sin x \cdot y", r"\sin(xy)"),
    ("f(x+1)", "f(x)+f(1)"),
    (r"\bar{3}x", r"\bar{4}x"),
    ("50\\%", "0.5"),
    ("1:2", "1/2"),
    ("1/0", "2/0"),
    (r"\tan 90^\circ", r"\cot 0"),
    ("0^0", "1"),
    (r"\ln 0", "0"),
    (r"\frac{1}{\sin\pi}", r"\frac{2}{\sin\pi}"),
    (r"\int_0^1 x\,dx", "1/2"),
    (r"\sum_{n=1}^{3} n", "6"),
    ("x=5", "5"),
    ("x=5", "y=5"),
    ("x=5", "x=6"),
    ("2x+3y=5", "2x+3y=5.0000000001"),
    ("x^2=4", "x=2"),
    ("xy=1", r"y=\frac{1}{x}"),
    ("2=2", "3=3"),
    ("x>5", "x<5"),
    ("x>5", r"x\ge 5"),
    ("2x>4", "-2x>-4"),
    ("x=1,2", "x=2,1"),
    (r"\{1\}", "1"),
    ("(1,2)", "(1,2.0)"),
    ("even", "neve"),
    ("", "0"),
    ("", " "),
]


@pytest.mark.parametrize(("left", "right"), SAME)
def test_same(left, right):
    assert equal(left, right)
    assert equal(right, left)
    assert equal(left, left)


@pytest.mark.parametrize(("left", "right"), OTHER)
def test_not_known_to_be_the_same(left, right):
    assert not equal(left, right)
    assert not equal(right, left)


@pytest.mark.parametrize(
    "text",
    [
        "9^{9^{9^{9}}}",
        "((9!)!)!",
        "1000000!",
        r"\binom{10^9}{5\cdot10^8}",
        r"e^{e^{e^{e^{9}}}}",
        r"\sin(10^{3000})",
        r"i^{i^{i^{i}}}",
        "(x+1)^{99999}",
        r"\frac{\pi^{50}}{e^{50}}" * 30,
        "x^{" * 39 + "2" + "}" * 39,
        r"\sqrt{" * 39 + "2" + "}" * 39,
        "1/" * 500 + "1",
        "(" * 100_000,
        "|" * 500,
        "1" * 1_000_000,
        "\x00\ud800",
        "__import__('os').system('exit 1')",
        "lambda: 1",
    ],
)
def test_monsters_are_refused(text):
    start = time.process_time()
    assert not equal(text, "5")
    assert not equal(text, "x+1")
    assert time.process_time() - start < 4.0


def test_digits_beyond_the_sizes_are_what_decides():
    """sqrt(n^2 + 1) and n + 1/2n differ by 1/8n^3: however large n, they are not the same."""
    for power in (1, 10, 50, 100):
        n = 10**power
        assert not equal(rf"\sqrt{{{n**2 + 1}}}", rf"{n}+\frac{{1}}{{{2 * n}}}")
        assert equal(rf"\sqrt{{{n**2 + 1}}}", rf"\frac{{\sqrt{{{4 * n**2 + 4}}}}}{{2}}")


def made(source, depth):
    """A formula in LaTeX with brackets wherever one could do with less, and the function it means."""
    if depth == 0:
        number = source.randint(1, 9)
        return source.choice(
            [
                ("x", lambda x, y: x),
                ("y", lambda x, y: y),
                (str(number), lambda x, y: number),
            ]
        )
    (left, f), (right, g) = made(source, depth - 1), made(source, depth - 1)
    return source.choice(
        [
            (f"({left}+{right})", lambda x, y: f(x, y) + g(x, y)),
            (f"({left}-{right})", lambda x, y: f(x, y) - g(x, y)),
            (rf"{left}\cdot {right}", lambda x, y: f(x, y) * g(x, y)),
            (f"({left})({right})", lambda x, y: f(x, y) * g(x, y)),
            (rf"\frac{{{left}}}{{{right}}}", lambda x, y: f(x, y) / g(x, y)),
            (f"({left})^{{2}}", lambda x, y: f(x, y) ** 2),
            (rf"\sin({left})", lambda x, y: cmath.sin(f(x, y))),
            (rf"\ln\left({left}\right)", lambda x, y: cmath.log(f(x, y))),
            (rf"\sqrt{{{left}}}", lambda x, y: cmath.sqrt(f(x, y))),
            (f"(e^{{{left}}})", lambda x, y: cmath.exp(f(x, y))),
        ]
    )


def differ(f, g):
    """Whether two functions have clearly different real values somewhere."""
    for x, y in ((0.37, 1.91), (2.3, 0.71), (-1.3, 0.4), (0.6, -2.2), (5.1, 3.3)):
        try:
            a, b = complex(f(x, y)), complex(g(x, y))
        except (ZeroDivisionError, ValueError, OverflowError):
            continue
        size = max(1.0, abs(a), abs(b))
        if size < 1e100 and max(abs(a.imag), abs(b.imag)) < 1e-12 and abs(a - b) > 1e-6 * size:
            return True
    return False


def test_formulas_that_differ_in_floats_are_never_the_same():
    source, different = random.Random(3), 0
    for _ in range(40):
        depth = source.choice([1, 1, 2, 3])
        (left, f), (right, g) = made(source, depth), made(source, depth)
        if differ(f, g):
            different += 1
            assert not equal(left, right), (left, right)
        assert equal(f"{left}+{right}", f"{right}+{left}"), (left, right)
    assert different > 15


@pytest.mark.parametrize(
    ("text", "sides"),
    [
        (r"\sin 2\pi x", (r"\sin(2\cdot \pi\cdot \variable{v78})",)),
        (r"\sin(x)y", (r"\sin(\variable{v78})\cdot \variable{v79}",)),
        (r"2\sin x \cdot \cos x", (r"2\cdot \sin(\variable{v78})\cdot \cos(\variable{v78})",)),
        ("1/2x", (r"\frac{1}{2}\cdot \variable{v78}",)),
        ("2(3)", (r"2\cdot (3)",)),
        (r"\frac12x", (r"\frac{1}{2}\cdot \variable{v78}",)),
        ("|a|b|c|", (r"|\variable{v61}|\cdot \variable{v62}\cdot |\variable{v63}|",)),
        ("-x^2", (r"-\variable{v78}^{2}",)),
        (".5", (r"\frac{5}{10}",)),
        ("x = 1", (r"\variable{v78}", "1")),
    ],
)
def test_formulas_are_written_out(text, sides):
    assert read(text).sides == sides


REFUSED = [
    "",
    "x2",
    "2 3",
    "a/bc",
    "x/2y",
    r"2\frac{1}{2}",
    r"\sin x/2",
    r"\sin x \cdot y",
    r"\sin(x)^2",
    "x^2^3",
    "5!!",
]
REFUSED += [
    "30^\\circ",
    "||a|-1|",
    "f(x)",
    "word",
    r"\foo",
    "x,y",
    "1:2",
    "(1",
    "1)",
    "{",
    r"\frac{1}",
    r"\sqrt[x]{2}",
    "5%",
]
REFUSED += [
    r"\frac.5",
    r"\frac0.5 2",
    r"\frac.1.2",
    r"\sqrt[3].5",
    r"\binom.5{2}",
    r"\sqrt1.",
    r"\log_1. 5",
    r"1\frac.5",
]
REFUSED += [
    r"\sin^{-2} x",
    "x" + "^2" * 2,
    "+",
    "1+",
    "=",
    "1=",
    "|",
    "°",
    "2°",
    r"\lfloor x",
    r"\log_",
    "x_",
    "1/" * 99 + "1",
]


@pytest.mark.parametrize("text", REFUSED)
def test_what_can_be_read_in_two_ways_is_refused(text):
    assert read(text) is None


def test_nothing_of_the_package_is_imported_in_a_worker():
    program = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('m', {math_verify_equal.__file__!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "assert module.equal('2+2', '4')\n"
        "print(sorted({'torch', 'lightning', 'gtpo_lightning'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
    assert done.stderr == ""


def test_threads_have_no_say():
    results = []
    threads = [
        threading.Thread(
            target=lambda n=n: results.append((equal(rf"\log_2 {2**n}", str(n)), equal(rf"\ln {n}", str(n))))
        )
        for n in (3, 4, 5, 6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [(True, False)] * 4


def test_a_file_that_is_not_there_is_an_error(tmp_path):
    copy = tmp_path / "math_verify_equal.py"
    copy.write_text(Path(math_verify_equal.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("copied", copy)
    with pytest.raises(FileNotFoundError, match="formulas"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
