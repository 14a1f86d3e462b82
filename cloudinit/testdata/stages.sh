#!/bin/bash
# Runs cloud-init's own stages on the seed in $SEED, in namespaces of their own, and writes what they did to $OUT:
# trace (what the scripts and the stubs wrote), user-data.txt, vendor-data.txt, cloud-init.log, result.
set -eu
export SEED OUT STUBS
exec unshare --mount --uts --fork --propagation private bash -eu -c '
etc=$(mktemp -d "$OUT/etc.XXXX")
mkdir -p "$etc/cloud.cfg.d"
cp -r /etc/cloud/templates "$etc/"
# Without this file cloud-init logs no warnings.
cp /etc/cloud/cloud.cfg.d/05_logging.cfg "$etc/cloud.cfg.d/"
cat > "$etc/cloud.cfg" <<CFG
datasource_list: [ NoCloud ]
datasource: { NoCloud: { fs_label: null } }
network: { config: disabled }
cloud_init_modules: [ bootcmd, write_files ]
cloud_config_modules: [ runcmd ]
cloud_final_modules: [ package_update_upgrade_install, write_files_deferred, scripts_vendor, scripts_per_once, scripts_per_boot, scripts_per_instance, scripts_user, final_message ]
system_info: { distro: debian, paths: { cloud_dir: /var/lib/cloud, templates_dir: /etc/cloud/templates } }
CFG
mkdir -p /var/lib/cloud
for dir in /var/lib/cloud /run /var/log; do mount -t tmpfs tmpfs "$dir"; done
mkdir -p /run/cloud-init /var/lib/cloud/seed/nocloud
mount --bind "$etc" /etc/cloud
cp "$SEED"/* /var/lib/cloud/seed/nocloud/
export TRACE="$OUT/trace" PATH="$STUBS:$PATH"
: > "$TRACE"
failed=none
cloud-init init --local >/dev/null 2>&1 || failed="init --local"
cloud-init init >/dev/null 2>&1 || failed=init
cloud-init modules --mode=config >/dev/null 2>&1 || failed=config
cloud-init modules --mode=final >/dev/null 2>&1 || failed=final
echo "$failed" > "$OUT/result"
cp /var/lib/cloud/instance/user-data.txt "$OUT/" || true
cp /var/lib/cloud/instance/vendor-data.txt "$OUT/" 2>/dev/null || true
cp /var/log/cloud-init.log "$OUT/"
'
