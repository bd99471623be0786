"""Hot kernels as they are compiled for other processors than this one: vectors of full width, and no call in a loop."""

import os
import platform
import re
import subprocess
import sys

import pytest

AVX2 = "+avx,+avx2,+fma,+bmi,+bmi2,+f16c,+popcnt,+lzcnt,+movbe,+sse4.2"
AVX512 = f"{AVX2},+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl"
# the processor as LLVM names it, its features, and the registers that count as wide
PROCESSORS = {
    "x86-64-v3": (AVX2, "ymm"),
    "x86-64-v4": (AVX512, "[yz]mm"),
}

# kernel: instructions on wide registers that do its work
HOT = {
    "selection._first_reaching": ["vpand", "vpcmp"],
    "selection.compact": ["vpand", "vpcmp"],
    "streaming.add_and_compact": ["vmulps", "vaddps", "vmovntps", "vpcmp"],
    "streaming._add_parts": ["vmulps", "vaddps", "vmovntps"],
    "merging._is_sound": ["vpcmpgtd"],
    "bins._mark": ["vaddps", "vmulps", "vpcmp"],
    "transforms._hadamard": ["vaddps", "vsubps", "vmulps", "vmovntps"],
    "statistics._magnitudes": ["vcvtps2pd", "vaddpd"],
    "segments._largest": ["vpand", "vpcmp"],
    "fitting._add_rows": ["vcvtps2pd", "vaddpd"],
    "fitting._exceeding": ["vpand", "vpcmp"],
    "few_bits._quantise": ["vaddps", "vmulps", "vminps", "vmovntps"],
    "few_bits._dequantise": ["vcvtdq2ps", "vmulps", "vmovntps"],
}

# the same on a processor of Arm with NEON
ON_ARM = {
    "selection._first_reaching": ["and", "cmge"],
    "streaming.add_and_compact": ["fmul", "fadd"],
    "streaming._add_parts": ["fmul", "fadd"],
    "transforms._hadamard": ["fadd", "fsub", "fmul"],
    "few_bits._quantise": ["fadd", "fmul"],
    "few_bits._dequantise": ["ucvtf", "fmul"],
}

CALLS = r"""
import re
import sys
from importlib import import_module
import llvmlite.binding as binding
import numpy as np
from mpicomp import AdaComp, ChunkedTopK, Quantised, SIDCo, SparseVector, TopK
from mpicomp.kernels import host
rng = np.random.default_rng(0)
values = rng.standard_normal(1 << 17, np.float32)
out = np.empty_like(values)
for compressor in TopK(0.001), SIDCo(0.001), Quantised(ChunkedTopK(4, 4096), "two_bit"):
    vector = compressor.compress(values)
    vector.validate()
AdaComp().compress(values, gradient=values)
host.raise_not_finite(values)
host.add_largest(values, values, out, 100, long=0)
host.add_parts(values, 1, [values], out, long=0)
host.hadamard(values, out, 256)
host.hadamard_writer(vector.indices, vector.values, out, 256, long=0)()
codes, scales = np.empty(1 << 16, np.uint8), np.empty(1 << 9, np.uint16)
host.encoder([values], None, 4, 256, out)(codes, scales)
host.encoder([values], None, 2, 256, out)(codes, np.empty(1 << 10, np.uint16))
host.decoder([(codes, scales)], 4, 256, [out])()


def for_arm(code):
    # the code is that of this processor, with its vectors
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    code = re.sub('target (triple|datalayout) = .*', "", code)
    code = re.sub('"(target-cpu|target-features|tune-cpu)"="[^"]*"', "", code)
    target = binding.Target.from_triple("aarch64-unknown-linux-gnu")
    machine = target.create_target_machine(cpu="neoverse-n1", opt=3)
    return machine.emit_assembly(binding.parse_assembly(code))


for name in sys.argv[2:]:
    module, kernel = name.split(".")
    found = getattr(import_module("mpicomp.kernels.host." + module), kernel)
    print("== " + name)
    if sys.argv[1] == "neoverse-n1":
        print(*map(for_arm, found.inspect_llvm().values()))
    else:
        print(*found.inspect_asm().values())
"""


def loops(text):
    """Return the innermost loops of compiled code: blocks that end with a jump to their own begin."""
    blocks = re.split(r"\n(?=\.L\w+:)", text)
    for block in blocks:
        label = block.partition(":")[0]
        inside, jump, _ = f"{block}\n".partition(f"\t{label}\n")
        if jump and inside.rstrip().rsplit("\t", 1)[-1].startswith("j"):
            yield inside


def compiled(processor, folder, names):
    """Return the machine code of hot kernels for a processor, by name."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder)}
    if processor in PROCESSORS:
        environment["NUMBA_CPU_NAME"] = processor
        environment["NUMBA_CPU_FEATURES"] = PROCESSORS[processor][0]
    done = subprocess.run(
        [sys.executable, "-c", CALLS, processor, *names],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    texts = (part.partition("\n") for part in done.stdout.split("== ")[1:])
    return {name: text for name, _, text in texts}


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="of x86-64")
@pytest.mark.parametrize("processor", PROCESSORS)
def test_hot_kernels_work_on_vectors_of_full_width(processor, tmp_path):
    register = PROCESSORS[processor][1]
    texts = compiled(processor, tmp_path, HOT)
    assert texts.keys() == HOT.keys()
    for name, needed in HOT.items():
        for instruction in needed:
            wide = rf"\t{instruction}\w*\s[^\n]*%{register}"
            assert re.search(wide, texts[name]), (name, instruction)
        for loop in loops(texts[name]):
            if re.search(rf"%{register}", loop):
                assert "\tcall" not in loop, (name, loop)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="of x86-64")
def test_hot_kernels_work_on_vectors_on_arm(tmp_path):
    texts = compiled("neoverse-n1", tmp_path, ON_ARM)
    assert texts.keys() == ON_ARM.keys()
    for name, needed in ON_ARM.items():
        for instruction in needed:
            vector = rf"\t{instruction}\tv\d+\.(4s|16b)"
            assert re.search(vector, texts[name]), (name, instruction)
