# Every command a person needs. The environment is made on first use, in .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
MODEL ?= smollm2-135m

# Of fuzz.
INPUTS ?= 1000000
SEED ?= 0

# Peers of bench-engine: NAME=PYTHON[:MODEL], docs/explanation/engine.md says how to make them.
PEERS ?=

# Of chaos: on the tiny model, and on MODEL; of soak.
FAULTS ?= 1000
MODEL_FAULTS ?= 50
MINUTES ?= 60

# Of test, and of check: processes that run the tests, a file at a time. With 2 it is faster.
PROCESSES ?= 1
IN_PROCESSES := $(if $(filter-out 1,$(PROCESSES)),--numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder)

# Of bench: its folder, which keeps every run, how long a part may take, files of prompts (none: the project's own).
BENCH ?= bench
PART_MINUTES ?= 115
PROMPTS ?=
REQUESTS ?= 1100
REPETITIONS ?= 3
POLICIES ?= fcfs,srpt-length,laps-sd,gittins
PACE ?=
ALSO ?= sjf@2:0.85 las@2:0.85 mlfq@2:0.85

# Of bench-scheduler: a checkout of another version, to be run in turn with this one.
AGAINST ?=
BENCH_SCHEDULER := $(BIN)/laps-sd bench scheduler --json docs/benchmarks/scheduler.json

# Of lint-protos.
BUF ?= build/buf/node_modules/.bin/buf

# Of test-failover: how many, and how many replicas must have a commit before it is told.
FAILOVERS ?= 200
REPLICAS ?= 1

# Of sim-faults.
SCHEDULES ?= 50000
FIRST ?= 0

# Of test-vllm: a folder with the Python sources of another vLLM, to run the toy executor on (pip download vllm==0.33.0
# --no-deps, then unzip the wheel there).
VLLM_SOURCES ?=
VLLM_ENV ?= build/vllm-env
# Of vllm-figures: it begins no run after so many, and goes on there the next time.
FIGURES_MINUTES ?= 25
REPLAY ?=
IN_VLLM := PYTHONPATH=. $(VLLM_ENV)/bin/python
# The time that an engine may take to start on a busy machine is in it.
VLLM_TESTS := -m pytest -p no:cacheprovider --confcutdir tests/vllm -W ignore --timeout 1800

.PHONY: demo demo-picture test test-apart test-cells test-compare test-containers test-doors test-elastic test-engine test-failover test-families \
    test-faults test-k8s test-stores test-vllm vllm-figures vllm-replay vllm-steps gpu-check sim-faults fuzz chaos soak bench bench-quick bench-scheduler bench-engine \
    bench-paper bench-front page-picture docs check lint lint-protos types architecture protos protos-check protos-reference audit audit-here \
    wheels env clean
.DEFAULT_GOAL := help

help:
	@echo "make demo   the stack on the real model: twelve prompts, first come first served, then by our policy"
	@echo "make demo-picture  the tutorial's picture of it, from a run on this machine"
	@echo "make test   all tests but the long ones below, against a real Redis and the real model"
	@echo "make test-stores  the tests that need a Redis, on Valkey and on Redis (three minutes; Debian: it fetches Redis)"
	@echo "make test-engine  two hundred prompts on the real model, against transformers (four minutes of one core)"
	@echo "make test-families  sixty tiny models of public families, each served right or refused (three minutes of one core)"
	@echo "make gpu-check  the engine on this machine's GPU: exactness, families, speed beside the floor (nine minutes; DEVICE=cpu: in little)"
	@echo "make test-faults  devices that hang or kill their worker, rolling restarts: on real processes (two minutes)"
	@echo "make test-failover  200 fail-overs of a Redis with Sentinels under load (45 minutes; FAILOVERS=... REPLICAS=0)"
	@echo "make test-elastic  workers that join, drain and die under load: on real processes (seven minutes)"
	@echo "make test-cells  four cells behind two gateways, one killed under load, every token checked (two minutes)"
	@echo "make test-doors  other people's clients on a live stack, each in an environment of its own; fuzzing of HTTP"
	@echo "make test-k8s  the manifests for Kubernetes: rendered by kubectl and validated (half a minute; no cluster)"
	@echo "make test-containers  images built, the stack run in them, each container killed in mid-stream (docker or podman)"
	@echo "make test-vllm  the plug-in for vLLM, in an environment of its own (made once: 3.4 GB; then ten minutes)"
	@echo "make vllm-figures  vLLM's own order beside ours on the real model, the most telling first (25 minutes of an idle machine, then it goes on)"
	@echo "make vllm-steps  the same counted in steps on the toy executor, which no busy machine disturbs (ten minutes of one core; it goes on)"
	@echo "make vllm-replay  answers of the record served again inside vLLM, in virtual time: what a change of the order does (REPLAY=... its arguments)"
	@echo "make sim-faults  50,000 simulated fault schedules, replayable by seed (about an hour of two cores)"
	@echo "make fuzz   a million inputs to every RPC of a real stack (half an hour; INPUTS=... SEED=...)"
	@echo "make chaos  1,050 faults on real processes under load, every token checked (about an hour; adds up over runs)"
	@echo "make soak   the same stack for an hour without faults: memory and open files of every process (MINUTES=60)"
	@echo "make check  lint, types, architecture, generated code, compose file, then the tests"
	@echo "make test-apart  drafts from another process, which is killed, cut off and lies: 300 faults, every token checked (ten minutes; FAULTS=... STREAMS=...)"
	@echo "make test-compare  laps-sd compare with whole services on a tiny model (two minutes)"
	@echo "make bench  policies compared on the live service: docs/explanation/benchmarks.md; repeat it until nothing is left"
	@echo "make bench-quick  a first taste of it (five minutes), which proves nothing"
	@echo "make bench-scheduler  the scheduler and Redis alone, its section of docs/explanation/benchmarks.md (15 minutes; AGAINST=...)"
	@echo "make bench-engine  the engine beside its peers: docs/explanation/engine.md (a quarter of an hour with PEERS=...)"
	@echo "make bench-paper  the LAPS-SD paper reproduced: docs/explanation/paper.md and its plots (30 minutes of one core)"
	@echo "make bench-front  the price of a low mean, simulated: docs/benchmarks/front.json and front.svg (seven minutes of one core)"
	@echo "make wheels build the wheels of the service, of the client alone and for vLLM: dist"
	@echo "make page-picture  docs/live-page.png: the live page of a real stack under load (a minute; needs chromium and npm)"
	@echo "make docs   the documentation as a site: build/site; first its tables are made anew"
	@echo "make audit  known vulnerabilities in the dependencies; fails also where that cannot be known"
	@echo "make protos regenerate the code of the .proto files"
	@echo "make lint-protos  the .proto files: style, and nothing that clients or the store rely on has changed (needs npm)"

env: $(VENV)/.installed
$(VENV)/.installed: pyproject.toml
	@echo "making $(VENV), of 2 GB, with PyPI's torch for Linux 6 GB: minutes in which nothing is said"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --editable ".[all]"
	@touch $@

demo: env
	$(BIN)/laps-sd pull $(MODEL)
	$(BIN)/laps-sd demo --model $(MODEL)

# The tutorial's picture, from a run on this machine: its numbers are that run's.
demo-picture: env
	$(BIN)/laps-sd pull $(MODEL)
	$(BIN)/laps-sd demo --model $(MODEL) --svg docs/demo.svg

test: env
	$(BIN)/laps-sd pull $(MODEL)
	$(BIN)/python -m pytest $(IN_PROCESSES)

bench: env
	@mkdir -p docs/benchmarks
	$(BIN)/laps-sd pull $(MODEL)
	$(BIN)/laps-sd compare --out $(BENCH) --model $(MODEL) --slots 2,4 --load 0.7,0.85,0.95,burst --policies $(POLICIES) \
	    $(ALSO:%=--also %) --requests $(REQUESTS) --repetitions $(REPETITIONS) $(if $(PACE),--pace $(PACE)) $(PROMPTS:%=--workload %) \
	    --minutes $(PART_MINUTES) --json docs/benchmarks/record.json --recordings docs/benchmarks/recordings
	$(BIN)/python -m laps_sd.compare.arrivals
	$(BIN)/python -m laps_sd.compare.page
	$(BIN)/python -m laps_sd.compare.chart

bench-scheduler: env
	@mkdir -p docs/benchmarks
	rm -f docs/benchmarks/scheduler.json
	$(BENCH_SCHEDULER) --workers 1 --workers 8 --workers 64 --waiting 100 --waiting 10000 --waiting 100000 --seconds 5
	$(BENCH_SCHEDULER) --workers 8 --waiting 10000 --tenants 1000 --gateways 32 --seconds 5
	$(BENCH_SCHEDULER) --stalls
	$(BENCH_SCHEDULER) --batch 256 --workers 1 --workers 4 --report-within-ms 0 --report-within-ms 50 --report-within-ms 100
	$(if $(AGAINST),$(BENCH_SCHEDULER) --against $(AGAINST) --workers 1 --workers 8 --workers 64 --waiting 10000 --seconds 5)
	test ! -e docs/benchmarks/record.json || $(BIN)/python -m laps_sd.compare.page

bench-quick: env
	$(BIN)/laps-sd pull $(MODEL)
	$(BIN)/laps-sd compare --quick --out $(BENCH)-quick --model $(MODEL) --html $(BENCH)-quick/report.html

bench-engine: env
	@mkdir -p docs/engine
	$(BIN)/laps-sd pull $(MODEL)
	$(BIN)/laps-sd bench engine --model $(MODEL) --json docs/engine/bench.json $(if $(PEERS),--peer $(PEERS))
	$(BIN)/python -m worker_service.bench.page

test-stores: env
	$(BIN)/python -m tests.stores

test-engine: env
	$(BIN)/laps-sd pull $(MODEL)
	$(BIN)/python -m pytest -s tests/slow/test_two_hundred_prompts.py

# On a machine without an environment of ours, and without a network to make one, with the Python that is there.
gpu-check:
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m tests.gpu $(if $(DEVICE),--device $(DEVICE) --size smallest)

test-families: env
	$(BIN)/python -m pytest tests/families

test-doors: env
	$(BIN)/laps-sd pull $(MODEL)
	$(BIN)/python -m pytest tests/doors

test-elastic: env
	$(BIN)/python -m pytest -s tests/slow/test_elastic.py

test-cells: env
	$(BIN)/python -m pytest -s tests/slow/test_cells.py

test-apart: env
	$(BIN)/python -m pytest -s tests/slow/test_apart.py

test-compare: env
	$(BIN)/python -m pytest -s tests/slow/test_compare.py

test-vllm: env
	$(BIN)/laps-sd pull $(MODEL)
	$(BIN)/python -m tests.vllm.environment $(VLLM_ENV)
	LAPS_SD_VLLM_WHOLE=1 $(IN_VLLM) $(VLLM_TESTS) tests/vllm
	$(if $(VLLM_SOURCES),VLLM_TARGET_DEVICE=cpu PYTHONPATH=$(VLLM_SOURCES):. $(VLLM_ENV)/bin/python $(VLLM_TESTS) \
	    tests/vllm/test_directed.py tests/vllm/test_plugin.py tests/vllm/test_engine_port.py)
	LAPS_SD_TESTS_VLLM_PYTHON=$(VLLM_ENV)/bin/python $(BIN)/python -m pytest tests/vllm/test_service.py \
	    tests/vllm/test_several_processes.py tests/vllm/test_serve.py

vllm-figures: env
	$(BIN)/laps-sd pull $(MODEL)
	$(BIN)/python -m tests.vllm.environment $(VLLM_ENV)
	$(IN_VLLM) -m tests.vllm.compare --minutes $(FIGURES_MINUTES)

vllm-replay: env
	$(BIN)/python -m tests.vllm.environment $(VLLM_ENV)
	$(IN_VLLM) -m tests.vllm.replay $(REPLAY)

vllm-steps: env
	$(BIN)/python -m tests.vllm.environment $(VLLM_ENV)
	$(IN_VLLM) -m tests.vllm.in_steps --json docs/benchmarks/vllm_steps.json
	$(BIN)/python -m tests.vllm.in_steps_page

test-faults: env
	$(BIN)/python -m pytest tests/faults

test-failover: env
	$(BIN)/python -m tests.scheduler.failover --failovers $(FAILOVERS) --replicas $(REPLICAS)

test-k8s: env
	$(BIN)/python -m pytest tests/k8s

# Where no registry of images can be reached: STAND_IN=1 makes stand-ins of the bases (tests/containers/stand_in.py).
test-containers: env
	$(BIN)/python -m tests.containers

sim-faults: env
	$(BIN)/python -m tests.scheduler.faults --schedules $(SCHEDULES) --seed $(FIRST)
	EXAMPLES=1000 $(BIN)/python -m pytest --timeout 3600 tests/scheduler/test_store_machine.py

fuzz: env
	$(BIN)/python -m tests.fuzz --inputs $(INPUTS) --seed $(SEED)

bench-paper: env
	@mkdir -p docs/paper
	$(BIN)/python -m scheduler_service.sim.decision --json docs/paper/decision.json
	$(BIN)/python -m scheduler_service.sim.worth
	$(BIN)/python -m scheduler_service.sim.paper

bench-front: env
	$(BIN)/python -m laps_sd.compare.front

page-picture: env
	$(BIN)/laps-sd pull $(MODEL)
	$(BIN)/python -m tests.doors.page.picture $(MODEL)

# To read it: python -m http.server --directory build/site
docs: env
	$(BIN)/python -m deploy.reference
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Rounds that are there count: broken off, it goes on where it was. Afresh: remove build/chaos/runs.jsonl.
chaos: env
	$(BIN)/laps-sd pull $(MODEL)
	$(BIN)/python -m tests.chaos --faults $(FAULTS)
	$(BIN)/python -m tests.chaos --model $(MODEL) --faults $(MODEL_FAULTS) --per-round 10 --users 6

soak: env
	$(BIN)/python -m tests.chaos.soak --minutes $(MINUTES)

check: lint types architecture protos-check compose-check audit-here test

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: env
	$(BIN)/mypy

architecture: env
	$(BIN)/lint-imports

compose-check: env
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec docker-compose.yml compose.gpu.yml compose.prometheus.yml

audit: env
	$(BIN)/python deploy/audit.py --strict

# Part of `make check`, which must work without the network: says loudly if it could not look.
audit-here: env
	$(BIN)/python deploy/audit.py

protos: env
	$(BIN)/python -m grpc_tools.protoc -I. --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy \
	    --python_out=. --mypy_out=. protos/v1/*.proto protos/link/v1/*.proto protos/oip/*.proto
	$(BIN)/python -m grpc_tools.protoc -I. --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
	    --grpc_python_out=. --mypy_grpc_out=. protos/v1/inference.proto protos/link/v1/*_link.proto protos/oip/inference.proto

protos-check: protos
	@git diff --exit-code -- protos/v1 protos/link protos/oip \
	    && ! git ls-files --others --exclude-standard -- protos/v1 protos/link protos/oip | grep . \
	    || (echo "generated code is out of date: run 'make protos' and commit" && false)

# Not part of `make check`: buf comes from npm. What clients use may not change; what travels on the links, or is
# stored, may only grow.
lint-protos: $(BUF)
	$(BUF) lint
	$(BUF) format --diff --exit-code
	$(BUF) breaking --against protos/reference.binpb --path protos/v1
	$(BUF) breaking --against protos/reference.binpb --path protos/link --config protos/link/buf.yaml

# After a release, or a change of the interface that is meant: later changes are compared with it as it is now.
protos-reference: $(BUF)
	$(BUF) build --exclude-source-info -o protos/reference.binpb

$(BUF):
	npm install --silent --no-save --prefix build/buf @bufbuild/buf@1.75.0

# From their sdists, so that nothing stale of an earlier build gets in. Nothing is uploaded.
wheels: env
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m build --outdir dist deploy/client
	$(BIN)/python -m build --outdir dist deploy/vllm

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info build dist deploy/client/gathered deploy/client/*.egg-info \
	    deploy/vllm/gathered deploy/vllm/*.egg-info
