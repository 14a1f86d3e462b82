//go:build depkeep

package depkeep

import (
	_ "github.com/digitalocean/go-libvirt"
	_ "github.com/google/go-cmp/cmp"
	_ "github.com/kdomanski/iso9660"
	_ "github.com/luthermonson/go-proxmox"
	_ "golang.org/x/crypto/ssh"
	_ "golang.org/x/crypto/ssh/agent"
	_ "golang.org/x/crypto/ssh/knownhosts"
	_ "golang.org/x/sync/errgroup"
	_ "golang.org/x/sync/semaphore"
	_ "libvirt.org/go/libvirtxml"
)
