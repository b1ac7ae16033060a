# Every target does all set-up itself: Python 3.10 or newer with pip is enough, no compiler.
# PYTHON=python3.12 picks the interpreter for a new .venv; PIP_* variables reach pip.

VENV ?= .venv
BENCHMARKS ?= architectures codecs step_time whole_step rewrites made_again packed_state first_use comet_table budget ways \
	packed compiled accuracy speeds audit calibrate selection parity parity_own prune start_up planning static_allocation traces arena \
	offload estimate estimate_layers feasibility ranges \
	estimate_architectures pipeline_paper pipeline_memory pipeline_schedules pipeline_training pipeline_wire \
	streaming gigapixel gigapixel_reach larger_than_memory torch_databases
export VENV PYTHON

.PHONY: demo tiny test check smoke docs bench parity clean

demo:  ## train the same network plain and squeezed, side by side
	@scripts/install
	@$(VENV)/bin/squeezebox demo

tiny:  ## a glance at each part, at every save
	@scripts/install test
	@scripts/test tests/tiny --quiet

test:  ## the checks, the package built and tried, and the tests; .ci/run adds the slow ones
	@scripts/install test
	@$(MAKE) --no-print-directory --jobs 2 check smoke
	@scripts/test --numprocesses 2 --dist worksteal --durations 10

check:  ## style, types, walls and the documentation
	@scripts/install test
	@scripts/check

smoke:  ## the package built, installed and tried, with what .venv has
	@scripts/install test
	@scripts/smoke --reuse

docs:  ## the site, in site/; its first page is site/index.html
	@scripts/install docs
	@scripts/docs

bench:  ## every claim's measurement, or some: make bench BENCHMARKS="codecs step_time"
	@scripts/install bench
	@set -e; for name in $(BENCHMARKS); do $(VENV)/bin/python -m benchmarks.$$name; done

parity:  ## exact, compiled and autocast training against plain PyTorch's, layer by layer
	@scripts/install test
	@$(VENV)/bin/python -m benchmarks.parity_own --no-report

clean:  ## what the other targets made, .venv included
	rm -rf $(VENV) build site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
