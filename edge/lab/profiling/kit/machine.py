"""The machine that a kit is for, as it describes itself: data for a device profile and for the choice of code."""

from __future__ import annotations

import re

from edge.backends.tvm.targets import app_targets
from edge.devices.cores import fast_cores, physical_cores
from edge.devices.host import flags_of, notable, processor_of
from edge.devices.profiles import find_model
from edge.devices.profiles.profile import Cluster, DeviceProfile, Figure, is_name
from edge.errors import InputError, UnsupportedError
from edge.lab.profiling.kit.device import unmeasured

_MARK = "--edge--"
# Asks for everything at once. A mark begins each part, since any part may be missing.
QUESTION = f"""
echo; echo {_MARK} uname; uname -s; uname -m
echo {_MARK} memory; cat /proc/meminfo 2>/dev/null
echo {_MARK} android; getprop ro.product.manufacturer 2>/dev/null; getprop ro.product.model 2>/dev/null
echo {_MARK} board; tr -d '\\0' </proc/device-tree/model 2>/dev/null; echo
echo {_MARK} cores
for cpu in /sys/devices/system/cpu/cpu[0-9]*; do
  [ "$(cat $cpu/online 2>/dev/null)" = 0 ] ||
    echo "$(cat $cpu/cpufreq/cpuinfo_max_freq 2>/dev/null):$(cat $cpu/topology/thread_siblings_list 2>/dev/null):$cpu:\
$(cat $cpu/cpu_capacity 2>/dev/null)"
done
echo {_MARK} cpuinfo; cat /proc/cpuinfo 2>/dev/null
echo {_MARK} end
"""


def profile_of(answer: str, name: str) -> DeviceProfile:
    """The profile of the machine called `name`, from its answer to QUESTION. Raises UnsupportedError for a machine that
    no kit runs on, InputError for an invalid answer."""
    parts = _parts(answer)
    words = parts.get("uname", "").split()
    if "end" not in parts or len(words) != 2:
        raise InputError(f"{name} did not answer as a machine with a POSIX shell does")
    system, machine = words
    if system != "Linux" or machine not in ("x86_64", "aarch64"):
        raise UnsupportedError(f"{name} runs {system} on {machine}: kits are for Linux on x86-64 and 64-bit ARM")
    cpuinfo, source = parts.get("cpuinfo", ""), "the machine itself"
    flags, found = flags_of(cpuinfo), processor_of(cpuinfo, machine, machine).name
    isa = next((each.name for each in app_targets(machine, "linux") if each.flags <= flags), None)
    if isa is None:
        raise UnsupportedError(f"{name} has a processor without AVX2 and FMA, which kits for x86-64 need")
    android = _printable(parts.get("android", "").replace("\n", " "))
    description = android or _printable(parts.get("board", "")) or _printable(found) or machine
    memory = next((line.split()[1] for line in parts.get("memory", "").splitlines() if line.startswith("MemTotal")), "")
    figures = {"memory": Figure(int(memory) * 1024, "measured", source)} if memory.isdecimal() and int(memory) else {}
    known = find_model(description)
    names = (known.name if known else "", _product(parts.get("android", "")), name)
    return DeviceProfile(
        name=next((each for each in names if is_name(each)), "target"),
        description=description,
        machine=machine,
        isa=isa,
        cpu=known.cpu if known and known.isa == isa else None,
        system="android" if android else "linux",
        clusters=(Cluster(_printable(found) or machine, fastest_cores(parts.get("cores", ""), machine), source),),
        instruction_sets=notable(flags),
        figures=figures | (unmeasured(known) if known else {}),
    )


def fastest_cores(listed: str, machine: str) -> int:
    """The number of physical cores worth using, as the C runtime counts them: on x86, all."""
    lines = (line.split(":") for line in listed.splitlines() if line.count(":") == 3)
    cores = physical_cores((siblings or cpu, capacity, khz) for khz, siblings, cpu, capacity in lines)
    return (fast_cores(cores.values()) if machine == "aarch64" else len(cores)) or 1


def _parts(answer: str) -> dict[str, str]:
    """The texts after each mark, by name. Text before the first mark, such as a login banner, is dropped."""
    found, name = dict[str, list[str]](), ""
    for line in answer.splitlines():
        if line.startswith(_MARK):
            name = line.removeprefix(_MARK).strip()
            found[name] = []
        elif name:
            found[name].append(line)
    return {name: "\n".join(lines) for name, lines in found.items()}


def _product(android: str) -> str:
    """The product's name as in profiles: `pixel-9` for `Pixel 9`. A serial, which must not be in a result, is not used.
    "" if the machine states no product."""
    model = android.strip().splitlines()[-1:]
    return re.sub(r"[^a-z0-9.]+", "-", model[0].lower()).strip("-.") if model else ""


def _printable(text: str) -> str:
    return " ".join(text.split())[:200] if text.isprintable() else ""
