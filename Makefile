# `make train`, `make test` and `make docs` need only Python 3.10 or later and make, and set up the rest themselves.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What training needs, and with what everything else needs
TRAINING := $(VENV)/.training
READY := $(VENV)/.ready

STEPS ?= 300000
ENV ?= Hopper-v4
SEED ?= 0

# A second thread gains small networks little
export OMP_NUM_THREADS := 1
# Set in many containers: without byte code kept, each process would compile all packages again
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test docs test-oldest lint type format pytest conformance dist clean

# constraints.txt pins everything, the build tools included, hence no build isolation. CONSTRAINTS= on the command line
# installs the newest versions that setup.cfg allows. Modules are compiled when first imported: all of them would take
# longer than their installation. The filter is for setuptools, which warns at every editable installation.
CONSTRAINTS := -c constraints.txt
INSTALL := PYTHONWARNINGS="ignore:Editable installation" \
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check $(CONSTRAINTS)

$(TRAINING): setup.cfg pyproject.toml constraints.txt _build_backend.py sb3_uatrpo_zoo_hook.py
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade pip setuptools wheel
	$(INSTALL) --no-build-isolation -e ".[mujoco,train]"
	touch $@

$(READY): $(TRAINING)
	$(INSTALL) --no-build-isolation -e ".[mujoco,train,ray,study,zoo,onnx,docs,tests]"
	touch $@

train: $(TRAINING)
	$(BIN)/python examples/train_mujoco.py --env $(ENV) --n-timesteps $(STEPS) --seed $(SEED)

# mypy keeps one core busy for a minute: beside the tests, that minute is not waited for
test: lint
	$(MAKE) --no-print-directory -j 2 type pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(READY)
	$(BIN)/mypy

# One process per core; the one that is done first takes over tests of the other
pytest: $(READY)
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal

# The documentation site, build/docs/index.html; a warning is an error
docs: $(READY)
	$(BIN)/python -m sphinx -W --keep-going -n -b html -d build/doctrees docs build/docs

# The tests with the oldest versions in constraints-oldest.txt; a .pth file borrows all other packages from .venv
OLDEST := .venv-oldest

$(OLDEST)/.ready: $(READY) constraints-oldest.txt
	rm -rf $(OLDEST) && $(BIN)/python -m venv $(OLDEST)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'), '$(CURDIR)', sep='\n')" \
		> "$$($(OLDEST)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/borrowed.pth"
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r constraints-oldest.txt
	touch $@

# RL Zoo requires the newest Stable-Baselines3
test-oldest: $(OLDEST)/.ready
	$(OLDEST)/bin/python -m pytest --numprocesses auto --dist loadfile --ignore tests/test_zoo.py \
		--ignore tests/study/test_plan.py --ignore tests/study/test_run.py --ignore tests/study/test_ray.py

# The tests of the installed Stable-Baselines3, with our classes in A2C's place; CONFORMANCE_REUSED=1 sets n_reused_rollouts
CONFORMANCE := build/conformance
CONFORMANCE_TESTS := run deterministic spaces sde custom_policy dict_env predict train_eval_mode save_load cnn identity \
	callbacks gae logger tensorboard

# Those of sb3-contrib, with our classes in MaskablePPO's place
CONFORMANCE_MASKS := build/conformance_masks
CONFORMANCE_MASKS_TESTS := cnn invalid_actions run train_eval_mode

$(CONFORMANCE)/pyproject.toml: PACKAGE := stable-baselines3
$(CONFORMANCE_MASKS)/pyproject.toml: PACKAGE := sb3-contrib
$(CONFORMANCE)/pyproject.toml $(CONFORMANCE_MASKS)/pyproject.toml: $(READY)
	rm -rf $(@D) && mkdir -p $(@D)
	$(BIN)/python -m pip download --quiet --disable-pip-version-check -c constraints.txt --no-deps --no-build-isolation \
		--no-binary $(PACKAGE) --dest $(@D) $(PACKAGE)
	tar -xzf $(@D)/*.tar.gz -C $(@D) --strip-components=1
	touch $@

conformance: $(CONFORMANCE)/pyproject.toml $(CONFORMANCE_MASKS)/pyproject.toml
	for class in UATRPO MatchedTRPO; do CONFORMANCE_CLASS=$$class $(BIN)/python -m pytest -p tests.conformance -q -rxXs \
		-c $(CONFORMANCE)/pyproject.toml --rootdir $(CONFORMANCE) \
		$(CONFORMANCE_TESTS:%=$(CONFORMANCE)/tests/test_%.py) || exit 1; done
	for class in MaskableUATRPO MaskableMatchedTRPO; do CONFORMANCE_CLASS=$$class \
		$(BIN)/python -m pytest -p tests.conformance_masks -q -rxXs \
		-c $(CONFORMANCE_MASKS)/pyproject.toml --rootdir $(CONFORMANCE_MASKS) \
		$(CONFORMANCE_MASKS_TESTS:%=$(CONFORMANCE_MASKS)/tests/test_%.py) || exit 1; done

# Wheel and sdist, with relative links; .github/workflows/release.yml makes them absolute and publishes
dist: $(READY)
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(OLDEST) build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
