#!/usr/bin/env bash
# One libvirt host in namespaces of its own: libvirtd, virtlogd and sshd of this machine with their own /etc/libvirt,
# /var/lib/libvirt and /run, on a network that only this machine sees. Needs root.
#
#	host.sh FOLDER POOL_MIB
#
# Besides port 22 sshd listens on port 2222, where it forwards no sockets. The user visitor may log in, and not use libvirt.
#
# It writes one line of key=value pairs when the host is up, takes one command a line on its standard input (see below), and
# answers each with "ok" or "failed". The end of its input is the end of the host, so a host never outlives whoever
# started it, whatever became of them.
set -euo pipefail
export PATH="$PATH:/usr/sbin:/sbin" LC_ALL=C
self=$(readlink -f "$0")

# The second half of this file runs inside, as the init process of the host.
if [ "${1:-}" = inside ]; then
	folder=$2 pool_mib=$3 guests=$4
	mount --make-rprivate /
	mount -t tmpfs tmpfs /run
	mkdir -p /run/lock /run/sshd /run/dbus
	mkdir -p "$folder"/{etc,lib,cache,log}
	cp -a /etc/libvirt/. "$folder/etc/"
	cp -a /var/lib/libvirt/. "$folder/lib/" 2>/dev/null || true
	rm -rf "$folder"/etc/qemu/*.xml "$folder"/etc/qemu/networks "$folder"/etc/storage "$folder"/etc/secrets "$folder"/lib/images/* "$folder"/lib/qemu/*
	mkdir -p "$folder"/lib/qemu/nvram "$folder/lib/images"
	mount --bind "$folder/etc" /etc/libvirt
	mount --bind "$folder/lib" /var/lib/libvirt
	mount --bind "$folder/cache" /var/cache/libvirt
	mount --bind "$folder/log" /var/log/libvirt
	mount -t tmpfs -o "size=${pool_mib}m,mode=0711" tmpfs /var/lib/libvirt/images
	cat >>/etc/libvirt/qemu.conf <<-EOF
		user = "root"
		group = "root"
		security_driver = "none"
	EOF
	# Root has a home of its own, so that what this machine's root has its shell do at every login is no part of the host. The
	# visitor may log in and has no right to libvirt's socket.
	mkdir -p "$folder/home"
	sed "s#^root:.*#root:x:0:0::$folder/home:/bin/bash#" /etc/passwd >"$folder/passwd"
	echo 'visitor:*:4242:65534::/:/bin/sh' >>"$folder/passwd"
	mount --bind "$folder/passwd" /etc/passwd
	ip link set lo up
	virtlogd -d
	libvirtd -d
	/usr/sbin/sshd -f "$folder/sshd_config"
	sed -e 's/^ListenAddress .*/&:2222/' -e 's/sshd.pid/&2/' "$folder/sshd_config" >"$folder/sshd_config2"
	echo 'AllowStreamLocalForwarding no' >>"$folder/sshd_config2"
	/usr/sbin/sshd -f "$folder/sshd_config2"
	for ((i = 0; i < 300; i++)); do
		virsh -q uri >/dev/null 2>&1 && break
		sleep 0.1
	done
	cat >"$folder/network.xml" <<-EOF
		<network><name>default</name><forward mode='route'/><bridge name='virbr0' stp='off' delay='0'/>
		<ip address='$guests.1' netmask='255.255.255.0'><dhcp><range start='$guests.10' end='$guests.250'/></dhcp></ip></network>
	EOF
	virsh -q net-define "$folder/network.xml"
	virsh -q net-start default
	virsh -q net-autostart default
	virsh -q pool-define-as default dir --target /var/lib/libvirt/images
	virsh -q pool-start default
	virsh -q pool-autostart default
	touch "$folder/up"
	# bash reaps whatever the daemons leave behind, which sleep alone would not.
	sleep infinity &
	wait
	exit
fi

folder=$(readlink -f "$1") pool_mib=$2
locks=/run/egress-testhost
mkdir -p "$locks"
# What a killed host left of its network is in the way of nobody who holds its lock.
for ((n = 1; n < 64; n++)); do
	exec 8>"$locks/$n"
	if flock -n 8; then break; fi
done
[ "$n" -lt 64 ] || { echo "64 test hosts are running" >&2; exit 1; }
space=egresshost$n outside=10.231.$n.1 inside=10.231.$n.2 guests=10.232.$n

sweep() {
	if [ -e "/run/netns/$space" ]; then
		ip netns pids "$space" | xargs -r kill -KILL 2>/dev/null || true
		ip netns del "$space" 2>/dev/null || true
	fi
	ip link del "egresshost$n" 2>/dev/null || true
}
sweep
trap sweep EXIT

ip netns add "$space"
ip link add "egresshost$n" type veth peer name eth0 netns "$space"
ip addr add "$outside/30" dev "egresshost$n"
ip link set "egresshost$n" up
ip -n "$space" addr add "$inside/30" dev eth0
ip -n "$space" link set eth0 up
ip -n "$space" route add default via "$outside"
ip route replace "$guests.0/24" via "$inside"

mkdir -p "$folder"
chmod 0711 "$folder"
[ -e "$folder/host_key" ] || ssh-keygen -q -t ed25519 -N '' -f "$folder/host_key"
[ -e "$folder/client_key" ] || ssh-keygen -q -t ed25519 -N '' -C egress-testhost -f "$folder/client_key"
cp "$folder/client_key.pub" "$folder/authorized_keys"
key=$(cut -d' ' -f1,2 "$folder/host_key.pub")
printf '%s\n' "$inside $key" "[$inside]:2222 $key" >"$folder/known_hosts"
cat >"$folder/sshd_config" <<-EOF
	ListenAddress $inside
	HostKey $folder/host_key
	AuthorizedKeysFile $folder/authorized_keys
	PidFile $folder/sshd.pid
	PermitRootLogin prohibit-password
	PasswordAuthentication no
	StrictModes no
	UsePAM no
	UseDNS no
	PrintMotd no
	Subsystem sftp internal-sftp
EOF
ip netns exec "$space" unshare --mount --pid --fork --kill-child --mount-proc "$self" inside "$folder" "$pool_mib" "$guests" >"$folder/init.log" 2>&1 </dev/null 8>&- &
init=$!
for ((i = 0; i < 1200; i++)); do
	[ -e "$folder/up" ] && break
	kill -0 "$init" 2>/dev/null || { cat "$folder/init.log" >&2; exit 1; }
	sleep 0.1
done
[ -e "$folder/up" ] || { echo "the host is not up after two minutes" >&2; cat "$folder/init.log" >&2; exit 1; }
pid=$(pgrep -P "$init" | head -1)
echo "address=$inside guests=$guests.0/24 namespace=$space init=$pid folder=$folder"

# within runs a command on the host.
within() { nsenter --target "$pid" --mount --pid --net -- "$@"; }
# images gives the path of the pool as this machine sees it.
images=/proc/$pid/root/var/lib/libvirt/images
while read -r command argument; do
	answer=ok
	case $command in
	cut) ip -n "$space" link set eth0 down ;; # no RST: whoever waits just hears nothing more
	mend)
		ip -n "$space" link set eth0 up
		ip -n "$space" route replace default via "$outside"
		;;
	lose) within iptables -I INPUT -i eth0 -m statistic --mode random --probability "$argument" -j DROP ;;
	keep) within iptables -D INPUT 1 ;;
	freeze) within pkill -STOP -x libvirtd ;;
	thaw) within pkill -CONT -x libvirtd ;;
	kill)
		within pkill -KILL -x libvirtd
		while within pgrep -x libvirtd >/dev/null; do sleep 0.05; done
		;;
	start) within libvirtd -d && for ((i = 0; i < 600; i++)); do within virsh -q uri >/dev/null 2>&1 && break || sleep 0.1; done ;;
	fill) dd if=/dev/zero of="$images/.fill" bs=64k status=none 2>/dev/null || true ;;
	empty) rm -f "$images/.fill" ;;
	deny) : >"$folder/authorized_keys" && within pkill -f 'sshd: root' || true ;;
	allow) cp "$folder/client_key.pub" "$folder/authorized_keys" ;;
	*) answer=failed ;;
	esac >&2 || answer=failed
	echo "$answer"
done
