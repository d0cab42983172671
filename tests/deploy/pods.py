"""Runs the containers of rendered pods as processes, in a file system of their own, as the user and with the volumes that the pod says:
what a kubelet does, as far as these programs can tell. Needs root; the network is the caller's (image_test.py has one of its own)."""
import os
import pathlib
import shlex
import subprocess
import time
import urllib.error
import urllib.request

import service


class Container(service.Process):
    """`spec`: command, args, env, securityContext, volumeMounts of a container; `files` gives what each mount holds: a folder to be
    mounted read-only, or None for an empty writable one in memory. `hosts`: names that resolve to this machine."""

    def __init__(self, rootfs, scratch, spec, pod_security, files, hosts=(), default_command=()):
        self.spec = spec
        root = scratch / 'root'
        subprocess.run(['cp', '-al', rootfs, root], check=True)
        script = ['set -e', 'mount --make-rprivate /', 'R=%s' % shlex.quote(str(root)), 'mount --bind $R $R', 'mount -t proc proc $R/proc',
                  'mount -t tmpfs -o mode=755 tmpfs $R/dev']
        for device in ('null', 'zero', 'random', 'urandom'):
            script.append('touch $R/dev/%s; mount --bind /dev/%s $R/dev/%s' % (device, device, device))
        script.append('mkdir -p $R/dev/shm; chmod 1777 $R/dev/shm')
        for mount in spec.get('volumeMounts', []):
            place = '$R' + mount['mountPath']
            source = files[mount['name']]
            if source is None:
                if mount['mountPath'] != '/dev/shm':
                    (root / mount['mountPath'].lstrip('/')).mkdir(parents=True, exist_ok=True)
                script.append('mount -t tmpfs -o mode=1777 tmpfs %s' % place)
            else:
                assert mount.get('readOnly'), mount
                (root / mount['mountPath'].lstrip('/')).mkdir(parents=True, exist_ok=True)
                script.append('mount --bind %s %s; mount -o remount,bind,ro %s' % (shlex.quote(str(source)), place, place))
        (root / 'etc').mkdir(exist_ok=True)
        (root / 'etc' / 'hosts').write_text(''.join('127.0.0.1 %s\n' % name for name in ('localhost', *hosts)))
        security = {**pod_security, **spec.get('securityContext', {})}
        if security.get('readOnlyRootFilesystem'):
            script.append('mount -o remount,bind,ro $R')
        uid = security['runAsUser']
        gid = security.get('runAsGroup', 0)
        groups = security.get('fsGroup', gid)
        command = list(spec.get('command', default_command)) + list(spec.get('args', []))
        environment = ['%s=%s' % (entry['name'], entry['value']) for entry in spec.get('env', [])]
        script.append('exec setpriv --no-new-privs chroot --userspec=%d:%d --groups=%d $R %s' % (uid, gid, groups, shlex.join(command)))
        super().__init__(['unshare', '--mount', '--pid', '--fork', '--kill-child', 'env', '-i', 'PATH=/usr/sbin:/usr/bin:/sbin:/bin', *environment,
                          'sh', '-c', '\n'.join(script)])

    def pid(self):
        """Of the program, process 1 of its own space."""
        children = pathlib.Path('/proc/%d/task/%d/children' % (self.process.pid, self.process.pid)).read_text().split()
        return int(children[0])

    def end(self, number=service.signal.SIGTERM, patience=service.PATIENCE):
        # The program itself, not unshare: the kernel no longer kills it with unshare, since it has become another user.
        if self.process.poll() is None:
            os.kill(self.pid(), number)
        return self.process.wait(patience)

    def status(self, name):
        """A line of /proc/PID/status."""
        for line in pathlib.Path('/proc/%d/status' % self.pid()).read_text().splitlines():
            if line.startswith(name + ':'):
                return line.split(':', 1)[1].split()
        raise AssertionError(name)

    def options_of_root(self):
        """How its root file system is mounted."""
        for line in pathlib.Path('/proc/%d/mountinfo' % self.pid()).read_text().splitlines():
            fields = line.split()
            if fields[4] == '/':
                return fields[5].split(',')
        raise AssertionError('no root')


def probe(container, name):
    """Asks a probe of the container once: does it say yes?"""
    what = container.spec[name]
    ports = {port['name']: port['containerPort'] for port in container.spec['ports']}
    if 'httpGet' in what:
        try:
            with urllib.request.urlopen('http://127.0.0.1:%d%s' % (ports[what['httpGet']['port']], what['httpGet']['path']),
                                        timeout=what['timeoutSeconds']) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False
    with service.socket.socket() as connection:
        connection.settimeout(what['timeoutSeconds'])
        return connection.connect_ex(('127.0.0.1', ports[what['tcpSocket']['port']])) == 0


def await_probe(container, name):
    """Asks it as the kubelet would, until it says yes or has failed too often."""
    what = container.spec[name]
    for _ in range(what['failureThreshold']):
        if probe(container, name):
            return
        if container.process.poll() is not None:
            raise AssertionError('%s ended:\n%s' % (container.spec['name'], container.output()[-8000:]))
        time.sleep(what['periodSeconds'])
    raise AssertionError('%s of %s never said yes:\n%s' % (name, container.spec['name'], container.output()[-8000:]))
