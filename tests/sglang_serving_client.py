"""SGLang's benchmark client, kept running: each line of its input is a JSON list of the client's arguments.

Run it with an interpreter that has sglang and datasets. It says ``done`` after each.
"""

import json
import sys

from sglang.benchmark import serving

print("done", flush=True)
for line in sys.stdin:
    sys.argv = ["serving", *json.loads(line)]
    serving.cli_main()
    print("done", flush=True)
