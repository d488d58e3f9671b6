"""The emulator itself: it finds what is broken in a kernel on purpose, and stops at what it does not know."""

import re

import pytest

from tests.emulator import checks, ptx
from tests.emulator.launch import Emulator, EmulatorError, Schedule

ARRIVAL = r"mbarrier\.arrive\.shared\.b64 [^;]*;"
# the second wait of the kernel is that of the warps that compute, for their operands
SECOND_WAIT = r"(?s)(mbarrier\.try_wait.*?)mbarrier\.try_wait[^;]*;"


@pytest.mark.parametrize(
    ("pattern", "broken", "said"),
    [
        pytest.param(ARRIVAL, ";", r"deadlock\n.*waits for mbarrier \d+ in phase", id="no-arrival"),
        pytest.param(ARRIVAL, r"\g<0> \g<0>", "more arrivals than the mbarrier", id="two-arrivals"),
        pytest.param(SECOND_WAIT, r"\1setp.eq.b32 P1, 0, 0;", "sums of |", id="no-wait"),
        pytest.param(r"wgmma\.wait_group[^;]*;", ";", "WGMMA that no warp has waited for", id="no-wait-for-wgmma"),
        pytest.param(
            r"st\.global\.b32\s+\[(%rd\d+)\]", r"st.global.b32 [\1+0x40000000]", "global write out", id="store"
        ),
        pytest.param(r"(st\.shared\.v2\.b32\s+\[%r\d+)\]", r"\1+4]", "not a multiple of 8", id="alignment"),
        pytest.param(r"bar\.sync\s+1, 256;", "bar.sync 1, 512;", "deadlock", id="barrier"),
    ],
)
def test_a_broken_kernel_is_found(emulator: Emulator, pattern: str, broken: str, said: str) -> None:
    def edit(text: str) -> str:
        edited, count = re.subn(pattern, broken, text, count=0 if "wait" in pattern and "try" not in pattern else 1)
        assert count, f"no {pattern} in the kernel"
        return edited

    with emulator.stands_in(2, Schedule(seed=1, late_wgmma=True, delay=200)):
        checks.sampled_up([300, 64], 136, False, True, ctas=1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(emulator, "edit", edit)
            with pytest.raises((EmulatorError, AssertionError), match=said):
                checks.sampled_up([300, 64], 136, False, True, ctas=1)


def test_an_error_names_the_line(emulator: Emulator) -> None:
    def edit(text: str) -> str:
        return text.replace("bar.sync", "mbarrier.arrive.shared.b64 _, [2048];\n\tbar.sync", 1)

    with emulator.stands_in(2, Schedule()), pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulator, "edit", edit)
        with pytest.raises(EmulatorError, match=r"no mbarrier.*\n  CTA 0,0,0 warp \d+ at line \d+\n    \d+: mbarrier"):
            checks.sampled_up([1], 72, False, True, ctas=1)


@pytest.mark.parametrize("instruction", ["tanh.approx.f32 %r1, %r1;", "add.sat.f32 %r1, %r1, %r1;", ".local .b8 a[4];"])
def test_the_parser_stops_at_what_it_does_not_know(instruction: str) -> None:
    text = f".visible .entry kernel(\n)\n{{\n\t.reg .b32 %r<2>;\n\t{instruction}\n\tret;\n}}\n"
    with pytest.raises(
        NotImplementedError, match=re.escape(f"line 5: the emulator does not know '{instruction[:-1]}'")
    ):
        list(ptx.kernels(text))
