"""What the tests of this folder share: where things are, what is needed, and an honest exit code."""
import os
import pathlib
import shutil
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SKIPPED = 77  # CTest shows such a test as skipped (SKIP_RETURN_CODE)


def require_program(name, hint='tools/install-deploy-tools'):
    """The path of a program; skips the test, saying why, where there is none."""
    found = shutil.which(name, path=os.environ.get('PATH', '') + ':/usr/sbin:/sbin')
    if not found:
        raise unittest.SkipTest('%s is not installed (%s)' % (name, hint))
    return found


def memory_folder(need=50e6):
    """Where temporary files of so many bytes cost no disk, or None: Prometheus, promtool and buildah wait for it at every turn."""
    return '/dev/shm' if os.access('/dev/shm', os.W_OK) and shutil.disk_usage('/dev/shm').free > need else None


def build_folder():
    return pathlib.Path(os.environ.get('DFLASHD_BUILD_DIR', ROOT / 'build' / 'cpu'))


def deploy_tools():
    """Where tools/install-deploy-tools puts Helm and the types."""
    return pathlib.Path(os.environ.get('DFLASHD_DEPLOY_TOOLS', ROOT / 'build' / 'deploy-tools'))


def built(name):
    """A program of the build under test; an error where it is not built: it is a part of what is tested."""
    places = {'dflashd': 'daemon', 'dflash-worker': 'worker', 'dflashctl': 'tools/dflashctl'}
    path = build_folder() / places[name] / name
    if not path.is_file():
        raise AssertionError('%s is not built' % path)
    return path


def run(*command, **options):
    """Runs a program to its end; an error with its output where it fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    if done.returncode != 0:
        raise AssertionError('%s\nends with %d:\n%s%s' % (' '.join(map(str, command)), done.returncode, done.stdout[-8000:],
                                                         done.stderr[-8000:]))
    return done.stdout


def main():
    """unittest.main, but a run in which something was skipped and nothing failed ends with SKIPPED, so that it shows."""
    program = unittest.main(module=sys.modules['__main__'], exit=False, verbosity=2)
    result = program.result
    for test, reason in result.skipped:
        print('SKIPPED %s: %s' % (test, reason))
    if not result.wasSuccessful() or result.testsRun + len(result.skipped) == 0:
        sys.exit(1)
    sys.exit(SKIPPED if result.skipped else 0)
