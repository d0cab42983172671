"""A real dflashd on the small pair, a real Prometheus that scrapes it, and load, for tests and for the picture in the README."""
import contextlib
import http.server
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request

import yaml

import support

TARGET = support.ROOT / 'models' / 'tiny-qwen3.6'
DRAFTER = support.ROOT / 'models' / 'tiny-qwen3.6-dflash'
GOLDEN = support.ROOT / 'tests' / 'golden' / 'golden.json'
PATIENCE = 300  # seconds for what ought to happen at once, on a busy machine


def wait_until(condition, what, patience=PATIENCE):
    """Asks until `condition` is true and returns what it says. For what nothing announces."""
    deadline = time.monotonic() + patience
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError('%s: not within %d s' % (what, patience))
        time.sleep(0.2)


class Process:
    """A child whose output is read as it comes. Ends with the block that it is opened in."""

    def __init__(self, command, **options):
        self.command = [str(part) for part in command]
        self.process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                        text=True, errors='replace', **options)
        self.lines = []
        self.changed = threading.Condition()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        for line in self.process.stdout:
            with self.changed:
                self.lines.append(line)
                self.changed.notify_all()
        with self.changed:
            self.lines.append(None)
            self.changed.notify_all()

    def output(self):
        with self.changed:
            return ''.join(line for line in self.lines if line is not None)

    def wait_for_line(self, pattern, patience=PATIENCE):
        deadline = time.monotonic() + patience
        with self.changed:
            seen = 0
            while True:
                for line in self.lines[seen:]:
                    seen += 1
                    if line is None:
                        raise AssertionError('%s ended without a line like %r:\n%s' % (self.command[0], pattern, self.output()[-8000:]))
                    found = re.search(pattern, line)
                    if found:
                        return found
                if not self.changed.wait(deadline - time.monotonic()):
                    raise AssertionError('%s has no line like %r:\n%s' % (self.command[0], pattern, self.output()[-8000:]))

    def end(self, number=signal.SIGTERM, patience=PATIENCE):
        """Its exit code, negative when a signal ended it."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(patience)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        try:
            self.end(signal.SIGTERM, 20)
        except subprocess.TimeoutExpired:
            self.end(signal.SIGKILL)
        self.reader.join(10)
        self.process.stdout.close()


def make_certificate(folder, days=30):
    """A self-signed certificate for localhost: (certificate, key)."""
    certificate, key = folder / 'tls.crt', folder / 'tls.key'
    support.run('openssl', 'req', '-x509', '-newkey', 'ec', '-pkeyopt', 'ec_paramgen_curve:prime256v1', '-nodes', '-days', days,
                '-subj', '/CN=localhost', '-addext', 'subjectAltName=DNS:localhost,IP:127.0.0.1', '-keyout', key, '-out', certificate)
    return certificate, key


def broken_drafter(folder):
    """A copy of the small drafter that is read wrongly, as another engine read its like for months: taps one layer too low, windows
    dropped, sliding layers bidirectional. Defects that this program exists for, planted in data."""
    folder.mkdir()
    config = json.loads((DRAFTER / 'config.json').read_text())
    config['dflash_config']['target_layer_ids'] = [layer - 1 for layer in config['dflash_config']['target_layer_ids']]
    config['layer_types'] = ['full_attention'] * len(config['layer_types'])
    config.update(use_sliding_window=False, sliding_window=None, is_causal=False)
    (folder / 'config.json').write_text(json.dumps(config))
    (folder / 'model.safetensors').symlink_to(DRAFTER / 'model.safetensors')
    return folder


class Dflashd(Process):
    def __init__(self, *flags, drafter=DRAFTER, ops='127.0.0.1:0', certificate=None):
        super().__init__([support.built('dflashd'), '--model', TARGET, '--draft-model', drafter, '--listen', '127.0.0.1:0',
                          '--ops-listen', ops, *flags])
        found = self.wait_for_line(r'listening on (\S+), ops on (\S+?)(,|$)')
        self.address, self.ops = found.group(1), found.group(2)
        self.trust = ['--tls-ca', certificate] if certificate else []
        self.wait_for_line('dflashd: ready')

    def metrics(self):
        return get('http://%s/metrics' % self.ops)

    def dflashctl(self, command, *flags):
        """Starts one against this server."""
        return Process([support.built('dflashctl'), command, '--address', self.address, *self.trust, *flags])

    def bench(self, *flags, kind='chat'):
        return self.dflashctl('bench', '--mode', 'closed', '--prompts', GOLDEN, '--kind', kind, '--quiet', *flags)


def get(url):
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.read().decode()


class Prometheus(Process):
    """Scrapes {job: target} every second, with rule files."""

    def __init__(self, folder, targets, rules=(), interval='1s'):
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / 'prometheus.yml'
        config.write_text(yaml.safe_dump({
            'global': {'scrape_interval': interval, 'scrape_timeout': interval, 'evaluation_interval': interval},
            'rule_files': [str(rule) for rule in rules],
            'scrape_configs': [{'job_name': job, 'static_configs': [{'targets': [target]}]} for job, target in targets.items()]}))
        super().__init__([support.require_program('prometheus'), '--config.file=%s' % config, '--storage.tsdb.path=%s' % (folder / 'data'),
                          '--web.listen-address=127.0.0.1:0'])
        self.url = 'http://127.0.0.1:' + self.wait_for_line(r'msg="Listening on" address=127\.0\.0\.1:(\d+)').group(1)
        self.wait_for_line('Server is ready')

    def api(self, path, **parameters):
        answer = json.loads(get('%s/api/v1/%s?%s' % (self.url, path, urllib.parse.urlencode(parameters))))
        assert answer['status'] == 'success', answer
        return answer['data']

    def query(self, expression, **parameters):
        return self.api('query', query=expression, **parameters)['result']

    def query_range(self, expression, start, end, step):
        return self.api('query_range', query=expression, start=start, end=end, step=step)['result']

    def value(self, expression):
        """Of a query with one sample; None where there is none."""
        result = self.query(expression)
        return float(result[0]['value'][1]) if len(result) == 1 else None


def hurried_rules(source, target, factor=60):
    """The rules with every window and every waiting time made shorter: a quarter of an hour takes 15 seconds."""
    seconds = {'s': 1, 'm': 60, 'h': 3600}

    def shorter(found):
        whole = int(found.group(2)) * seconds[found.group(3)]
        return '%s%ds%s' % (found.group(1), max(whole // factor, 5), found.group(4))
    text = source.read_text()
    text = re.sub(r'(\[)(\d+)([smh])(\])', shorter, text)
    target.write_text(re.sub(r'(for: )(\d+)([smh])()', shorter, text))
    return target


@contextlib.contextmanager
def page(text):
    """An HTTP server on this machine that answers every GET with `text`: its address."""
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header('Content-Type', 'text/plain; version=0.0.4')
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield '127.0.0.1:%d' % server.server_port
    finally:
        server.shutdown()
        server.server_close()


def children_of(pid, program):
    """Process ids of the children of `pid` that run `program`."""
    found = []
    for task in pathlib.Path('/proc/%d/task' % pid).iterdir():
        for child in (task / 'children').read_text().split():
            arguments = pathlib.Path('/proc/%s/cmdline' % child).read_bytes().split(b'\0')
            if arguments[0].decode().endswith(program):
                found.append(int(child))
    return sorted(found)


def free_port():
    """A port of this machine that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return probe.getsockname()[1]
