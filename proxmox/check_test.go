package proxmox_test

import (
	"strings"
	"testing"

	"crawl.example.com/egress/internal/fakepve"
	"crawl.example.com/egress/provider"
	"crawl.example.com/egress/proxmox"
)

// more gives every node the template with another configuration.
func more(c *fakepve.Cluster, config map[string]string) {
	for i, node := range []string{"pve1", "pve2", "pve3"} {
		c.AddTemplate(node, 9000+i, "debian", fakepve.Template{Config: config})
	}
}

func TestCheckKnowsWhatTheConfigurationAndTheTemplateAddToTheNeeds(t *testing.T) {
	const zone = "/sdn/zones/localnetwork"
	full := func(storage string) func(*fakepve.Cluster, *proxmox.Config) {
		return func(_ *fakepve.Cluster, config *proxmox.Config) { config.FullClone, config.DiskStorage = true, storage }
	}
	for name, c := range map[string]struct {
		config func(c *fakepve.Cluster, config *proxmox.Config)
		spoil  func(b *bench)
		reason provider.Reason
		text   string
	}{
		"VM.Audit that does not propagate": {nil, func(b *bench) {
			b.Fault(fakepve.Fault{Method: "GET", Path: "/access/permissions", Body: `{"data":{"/vms":{"VM.Audit":0}}}`})
		}, provider.ReasonPermissionDenied, "VM.Audit on /vms"},
		"a pool": {func(c *fakepve.Cluster, config *proxmox.Config) { config.Pool = "egress" }, func(b *bench) {
			b.Grant(tokenID, "/pool/egress", "VM.Allocate")
		}, provider.ReasonPermissionDenied, "VM.PowerMgmt on /pool/egress"},
		"a pool that has nothing from /vms": {func(c *fakepve.Cluster, config *proxmox.Config) { config.Pool = "egress" }, func(b *bench) {
			b.Grant(tokenID, "/pool/egress")
		}, provider.ReasonPermissionDenied, "VM.Allocate on /pool/egress"},
		"another bridge": {func(_ *fakepve.Cluster, config *proxmox.Config) { config.Bridge = "vmbr1" }, func(b *bench) {
			b.Revoke(tokenID, zone)
			b.Grant(tokenID, zone+"/vmbr0", "SDN.Use")
			b.Grant(tokenID, "/vms", "VM.Allocate", "VM.Audit", "VM.Clone", "VM.Config.CDROM", "VM.Config.CPU", "VM.Config.Cloudinit", "VM.Config.Disk", "VM.Config.Memory",
				"VM.Config.Network", "VM.Config.Options", "VM.PowerMgmt", "VM.GuestAgent.Audit")
		}, provider.ReasonPermissionDenied, "SDN.Use on " + zone + "/vmbr1"},
		"a bridge takes the right to change the network": {func(_ *fakepve.Cluster, config *proxmox.Config) { config.Bridge = "vmbr1" }, nil, provider.ReasonPermissionDenied, "VM.Config.Network on /vms"},
		"a VLAN takes the right to change the network":   {func(_ *fakepve.Cluster, config *proxmox.Config) { config.VLAN = 17 }, nil, provider.ReasonPermissionDenied, "VM.Config.Network on /vms"},
		"a VLAN of the template": {func(c *fakepve.Cluster, _ *proxmox.Config) {
			more(c, map[string]string{"net0": "virtio=BC:24:11:00:00:01,bridge=vmbr0,tag=17"})
		}, func(b *bench) {
			b.Grant(tokenID, zone+"/vmbr0/17")
		}, provider.ReasonPermissionDenied, "SDN.Use on " + zone + "/vmbr0/17"},
		"a second interface": {func(c *fakepve.Cluster, _ *proxmox.Config) {
			more(c, map[string]string{"net1": "virtio=BC:24:11:00:00:02,bridge=vmbr7"})
		}, func(b *bench) {
			b.Grant(tokenID, zone+"/vmbr7")
		}, provider.ReasonPermissionDenied, "SDN.Use on " + zone + "/vmbr7"},
		"a virtual network of another zone": {func(c *fakepve.Cluster, _ *proxmox.Config) {
			more(c, map[string]string{"net0": "virtio=BC:24:11:00:00:01,bridge=office"})
		}, func(b *bench) {
			b.Revoke(tokenID, zone)
			b.Grant(tokenID, "/sdn/zones/building", "SDN.Use")
		}, provider.ReasonReady, ""},
		"a virtual network of no zone": {func(c *fakepve.Cluster, _ *proxmox.Config) {
			more(c, map[string]string{"net0": "virtio=BC:24:11:00:00:01,bridge=office"})
		}, func(b *bench) {
			b.Revoke(tokenID, zone)
			b.Grant(tokenID, "/sdn/zones/building", "SDN.Audit")
		}, provider.ReasonPermissionDenied, "SDN.Use on " + zone + "/office"},
		"a storage for the disks": {full("shared"), func(b *bench) {
			b.Grant(tokenID, "/storage/shared", "Datastore.AllocateSpace")
			b.Revoke(tokenID, "/storage/local-lvm")
		}, provider.ReasonReady, ""},
		"no right to a storage for the disks": {full("shared"), nil, provider.ReasonPermissionDenied, "Datastore.AllocateSpace on /storage/shared"},
		"a storage that takes no disks": {full("files"), func(b *bench) {
			b.AddStorage(fakepve.Storage{ID: "files", Type: "dir", Content: []string{"iso"}, Size: 1 << 40})
			b.Grant(tokenID, "/storage/files", "Datastore.AllocateSpace")
		}, provider.ReasonStorageNotFound, "want images"},
		"a second disk": {func(c *fakepve.Cluster, _ *proxmox.Config) {
			more(c, map[string]string{"virtio1": "shared:vm-9000-disk-1,size=1G"})
		}, nil,
			provider.ReasonPermissionDenied, "Datastore.AllocateSpace on /storage/shared, where virtio1"},
		"a cloud-init drive of another storage": {func(c *fakepve.Cluster, _ *proxmox.Config) {
			more(c, map[string]string{"ide0": "shared:vm-9000-cloudinit,media=cdrom"})
		}, nil,
			provider.ReasonPermissionDenied, "Datastore.AllocateSpace on /storage/shared, where ide0"},
		"another disc in the drive": {func(c *fakepve.Cluster, _ *proxmox.Config) {
			more(c, map[string]string{"ide1": "shared:iso/tools.iso,media=cdrom"})
		}, nil, provider.ReasonReady, ""},
		"what is granted above": {nil, func(b *bench) {
			b.Revoke(tokenID, "/storage/local")
			b.Revoke(tokenID, "/storage/local-lvm")
			b.Grant(tokenID, "/storage", "Datastore.Allocate", "Datastore.AllocateTemplate", "Datastore.AllocateSpace")
		}, provider.ReasonReady, ""},
		"what is granted above and taken away": {nil, func(b *bench) {
			b.Grant(tokenID, "/storage", "Datastore.Allocate", "Datastore.AllocateTemplate", "Datastore.AllocateSpace")
			b.Grant(tokenID, "/storage/local-lvm")
		}, provider.ReasonPermissionDenied, "Datastore.AllocateSpace on /storage/local-lvm"},
		"an old version": {nil, func(b *bench) {
			b.Fault(fakepve.Fault{Method: "GET", Path: "/version", Body: `{"data":{"version":"7.4-3","release":"7.4"}}`})
		}, provider.ReasonUnsupported, "want 8 or newer"},
	} {
		t.Run(name, func(t *testing.T) {
			run(t, fakepve.Config{}, c.config, func(b *bench) {
				if c.spoil != nil {
					c.spoil(b)
				}
				for _, h := range b.p.Check(b.Context()) {
					if h.Reason != c.reason || h.Ready != (c.reason == provider.ReasonReady) || !strings.Contains(h.Message, c.text) {
						b.Errorf("%+v, want %s with %q", h, c.reason, c.text)
					}
				}
			})
		})
	}
}

func TestWhatAPoolGrantsCountsForTheVMsInItWithoutPropagation(t *testing.T) {
	run(t, fakepve.Config{}, func(_ *fakepve.Cluster, config *proxmox.Config) { config.Pool = "egress" }, func(b *bench) {
		b.Fault(fakepve.Fault{Method: "GET", Path: "/access/permissions", Body: `{"data":{"/vms":{"VM.Audit":1},"/vms/9000":{"VM.Clone":0},"/vms/9001":{"VM.Clone":0},"/vms/9002":{"VM.Clone":0},
			"/pool/egress":{"VM.Allocate":0,"VM.Config.CDROM":0,"VM.Config.CPU":0,"VM.Config.Cloudinit":0,"VM.Config.Disk":0,"VM.Config.Memory":0,"VM.Config.Options":0,
			"VM.PowerMgmt":0,"VM.GuestAgent.Unrestricted":0},"/nodes/pve1":{"Sys.Audit":0},"/nodes/pve2":{"Sys.Audit":0},"/nodes/pve3":{"Sys.Audit":0},
			"/storage/local":{"Datastore.Allocate":0,"Datastore.AllocateTemplate":0,"Datastore.AllocateSpace":0},"/storage/local-lvm":{"Datastore.AllocateSpace":0},
			"/sdn/zones/localnetwork/vmbr0":{"SDN.Use":0}}}`})
		for _, h := range b.p.Check(b.Context()) {
			if !h.Ready {
				b.Errorf("%+v", h)
			}
		}
	})
}

func TestACheckAsksForThePrivilegesAtAPathOnceHoweverManyTemplatesThereAre(t *testing.T) {
	run(t, fakepve.Config{}, func(_ *fakepve.Cluster, config *proxmox.Config) {
		for _, image := range []string{"a", "b", "c", "d"} {
			config.Templates[image] = proxmox.Template{Name: "debian"}
		}
	}, func(b *bench) {
		for _, h := range b.p.Check(b.Context()) {
			if !h.Ready {
				b.Errorf("%+v", h)
			}
		}
		// All at once; and the node, the template and its bridge, which have what is granted above them.
		if n := b.Count("GET", "/access/permissions"); n != 3*4 {
			b.Errorf("%d requests for privileges of three nodes, want 12", n)
		}
	})
}

func TestAListIsNotWholeWithAPrivilegeThatDoesNotReachTheVMs(t *testing.T) {
	run(t, fakepve.Config{}, nil, func(b *bench) {
		x := b.create("a")
		b.Fault(fakepve.Fault{Method: "GET", Path: "/access/permissions", Body: `{"data":{"/vms":{"VM.Audit":0}}}`})
		_, err := b.p.List(b.Context(), "crawl")
		b.wants(err, provider.ErrDenied, provider.ReasonPermissionDenied, "VM.Audit")
		_, err = b.try("b")
		b.wants(err, provider.ErrDenied, provider.ReasonPermissionDenied, "VM.Audit")
		b.Remove(vmidOf(x))
		b.wants(b.p.Delete(b.Context(), x.ID), provider.ErrDenied, provider.ReasonPermissionDenied, "VM.Audit")
	})
}
