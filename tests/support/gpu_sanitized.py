"""One rank of tools/gpu-sanitize.sh: makes every collective, small. Exits with 1 if a result was wrong."""

import sys

from gpu_programs import collectives, messages

if __name__ == "__main__":
    found = [collectives(dtype, [1, 1000, 20_011]) for dtype in ("f32", "i8")]
    found.append(messages(20_011))
    wrong = [line for one in found for line in one["wrong"]]
    print(f"{sum(one['made'] for one in found)} calls, {len(wrong)} wrong", *wrong, sep="\n")
    sys.exit(bool(wrong))
