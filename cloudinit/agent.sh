#!/bin/sh
# Installs and starts the QEMU guest agent, by which the host learns this machine's address.
# It may run again at any time, does nothing where the agent runs, and never fails the boot.
PATH="$PATH:/usr/sbin:/usr/bin:/sbin:/bin"
export PATH

have() { command -v "$1" >/dev/null 2>&1; }

running() {
	if have pidof; then pidof qemu-ga >/dev/null 2>&1; else pgrep -x qemu-ga >/dev/null 2>&1; fi
}

# Each package manager waits for its own lock where it can; the loop below waits for the rest.
install_agent() {
	if have qemu-ga; then
		return 0
	elif have apt-get; then
		DEBIAN_FRONTEND=noninteractive
		export DEBIAN_FRONTEND
		apt-get -q -o DPkg::Lock::Timeout=60 update
		apt-get -q -y -o DPkg::Lock::Timeout=60 --no-install-recommends install qemu-guest-agent
	elif have dnf; then
		dnf -q -y install qemu-guest-agent
	elif have yum; then
		yum -q -y install qemu-guest-agent
	elif have zypper; then
		zypper -n -q install qemu-guest-agent
	elif have apk; then
		apk add --wait 60 qemu-guest-agent
	else
		echo "egress: no known package manager, so no guest agent" >&2
		return 2
	fi
}

start_agent() {
	if have systemctl; then
		systemctl daemon-reload
		systemctl start qemu-guest-agent
	elif have rc-service; then
		rc-update add qemu-guest-agent default
		rc-service qemu-guest-agent start
	else
		qemu-ga -d
	fi
}

running && exit 0
tries=0
until install_agent; do
	[ $? -eq 2 ] && exit 0
	tries=$((tries + 1))
	if [ "$tries" -ge 10 ]; then
		echo "egress: the guest agent could not be installed" >&2
		exit 0
	fi
	sleep 6
done
running || start_agent || echo "egress: the guest agent could not be started" >&2
exit 0
