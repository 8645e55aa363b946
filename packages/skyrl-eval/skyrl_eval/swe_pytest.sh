#!/bin/bash
set -uxo pipefail
source /opt/miniconda3/bin/activate
conda activate testbed
cd /testbed
git checkout {commit} {graded}
git apply -v - <<'EOF_114329324912'
{patch}
EOF_114329324912
: '{START}'
pytest -rA {files}
: '{END}'
git checkout {commit} {graded}
