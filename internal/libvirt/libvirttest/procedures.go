package libvirttest

import (
	"fmt"
	"reflect"

	golibvirt "github.com/digitalocean/go-libvirt"
)

// procedure is one call of the protocol.
type procedure struct {
	name       string
	callLocked func(h *Host, payload []byte) (any, error)
}

func arguments[A any](payload []byte) (A, error) {
	var args A
	d := &decoder{b: payload}
	d.decode(reflect.ValueOf(&args).Elem())
	if d.err == nil && len(d.b) > 0 {
		d.err = fmt.Errorf("%d bytes too many", len(d.b))
	}
	if d.err != nil {
		return args, fail(golibvirt.ErrRPC, "Unable to decode message payload: %v", d.err)
	}
	return args, nil
}

// with makes a procedure of a method that takes A.
func with[A any](name string, f func(h *Host, args A) (any, error)) procedure {
	return procedure{name, func(h *Host, payload []byte) (any, error) {
		args, err := arguments[A](payload)
		if err != nil {
			return nil, err
		}
		return f(h, args)
	}}
}

// without makes a procedure of a method that takes nothing.
func without(name string, f func(h *Host) (any, error)) procedure {
	return procedure{name, func(h *Host, _ []byte) (any, error) { return f(h) }}
}

// procedures are by the numbers of src/remote/remote_protocol.x.
var procedures = map[uint32]procedure{
	1:   without("ConnectOpen", func(*Host) (any, error) { return nil, nil }),
	2:   without("ConnectClose", func(*Host) (any, error) { return nil, nil }),
	6:   without("NodeGetInfo", (*Host).nodeInfoLocked),
	23:  with("DomainLookupByName", (*Host).domainByNameLocked),
	24:  with("DomainLookupByUUID", (*Host).domainByUUIDLocked),
	29:  with("DomainSetAutostart", (*Host).autostartLocked),
	46:  with("NetworkLookupByName", (*Host).networkByNameLocked),
	66:  without("AuthList", func(*Host) (any, error) { return golibvirt.AuthListRet{Types: []golibvirt.AuthType{0}}, nil }),
	83:  with("StoragePoolRefresh", (*Host).refreshLocked),
	84:  with("StoragePoolLookupByName", (*Host).poolByNameLocked),
	87:  with("StoragePoolGetInfo", (*Host).poolInfoLocked),
	88:  with("StoragePoolGetXMLDesc", (*Host).poolXMLLocked),
	93:  with("StorageVolCreateXML", (*Host).createVolumeLocked),
	94:  with("StorageVolDelete", (*Host).deleteVolumeLocked),
	95:  with("StorageVolLookupByName", (*Host).volumeByNameLocked),
	99:  with("StorageVolGetXMLDesc", (*Host).volumeXMLLocked),
	152: with("NetworkIsActive", (*Host).networkActiveLocked),
	154: with("StoragePoolIsActive", (*Host).poolActiveLocked),
	157: without("ConnectGetLibVersion", func(h *Host) (any, error) { return golibvirt.ConnectGetLibVersionRet{LibVer: h.config.Version}, nil }),
	183: with("DomainHasManagedSaveImage", (*Host).managedSaveLocked),
	196: with("DomainCreateWithFlags", (*Host).startLocked),
	208: {name: "StorageVolUpload"},
	209: with("StorageVolDownload", (*Host).downloadLocked),
	212: with("DomainGetState", (*Host).stateLocked),
	228: with("NodeGetMemoryStats", (*Host).memoryLocked),
	231: with("DomainUndefineFlags", (*Host).undefineLocked),
	234: with("DomainDestroyFlags", (*Host).destroyLocked),
	258: with("DomainShutdownFlags", (*Host).shutdownLocked),
	264: with("DomainSetMetadata", (*Host).setMetadataLocked),
	265: with("DomainGetMetadata", (*Host).getMetadataLocked),
	282: with("StoragePoolListAllVolumes", (*Host).listVolumesLocked),
	341: with("NetworkGetDhcpLeases", (*Host).leasesLocked),
	342: with("ConnectGetDomainCapabilities", (*Host).capabilitiesLocked),
	344: with("ConnectGetAllDomainStats", (*Host).statsLocked),
	350: with("DomainDefineXMLFlags", (*Host).defineLocked),
	353: with("DomainInterfaceAddresses", (*Host).addressesLocked),
	378: with("StorageVolGetInfoFlags", (*Host).volumeInfoLocked),
	420: with("DomainAgentSetResponseTimeout", (*Host).agentTimeoutLocked),
}

func (h *Host) nodeInfoLocked() (any, error) {
	return golibvirt.NodeGetInfoRet{Memory: uint64(h.config.MemoryMiB) << 10, Cpus: int32(h.config.CPUs), Nodes: 1, Sockets: 1, Cores: int32(h.config.CPUs), Threads: 1}, nil
}

func (h *Host) memoryLocked(args golibvirt.NodeGetMemoryStatsArgs) (any, error) {
	stats := []golibvirt.NodeGetMemoryStats{{Field: "total", Value: uint64(h.config.MemoryMiB) << 10}, {Field: "free", Value: uint64(h.config.MemoryMiB) << 9}}
	if args.Nparams == 0 {
		return golibvirt.NodeGetMemoryStatsRet{Nparams: int32(len(stats))}, nil
	}
	return golibvirt.NodeGetMemoryStatsRet{Params: stats, Nparams: int32(len(stats))}, nil
}

func (h *Host) capabilitiesLocked(args golibvirt.ConnectGetDomainCapabilitiesArgs) (any, error) {
	kind := ""
	if len(args.Virttype) == 1 {
		kind = args.Virttype[0]
	}
	if kind == "kvm" && h.config.NoKVM {
		return nil, fail(golibvirt.ErrInvalidArg, "invalid argument: KVM is not supported by '/usr/bin/qemu-system-x86_64' on this host")
	}
	firmware := "<value>bios</value>"
	if !h.config.NoUEFI {
		firmware += "<value>efi</value>"
	}
	return golibvirt.ConnectGetDomainCapabilitiesRet{Capabilities: "<domainCapabilities><domain>" + kind + "</domain><arch>x86_64</arch>" +
		"<os supported='yes'><enum name='firmware'>" + firmware + "</enum></os></domainCapabilities>"}, nil
}

func (h *Host) networkLocked(n golibvirt.Network) (*Network, error) {
	if found := h.networks[n.Name]; found != nil {
		return found, nil
	}
	return nil, fail(golibvirt.ErrNoNetwork, "Network not found: no network with matching name '%s'", n.Name)
}

func (h *Host) networkByNameLocked(args golibvirt.NetworkLookupByNameArgs) (any, error) {
	n := golibvirt.Network{Name: args.Name}
	if _, err := h.networkLocked(n); err != nil {
		return nil, err
	}
	return golibvirt.NetworkLookupByNameRet{Net: n}, nil
}

func (h *Host) networkActiveLocked(args golibvirt.NetworkIsActiveArgs) (any, error) {
	n, err := h.networkLocked(args.Net)
	if err != nil {
		return nil, err
	}
	return golibvirt.NetworkIsActiveRet{Active: number(!n.Inactive)}, nil
}

func (h *Host) leasesLocked(args golibvirt.NetworkGetDhcpLeasesArgs) (any, error) {
	n, err := h.networkLocked(args.Net)
	if err != nil {
		return nil, err
	}
	if n.Inactive {
		return nil, fail(golibvirt.ErrOperationInvalid, "Requested operation is not valid: network '%s' is not active", n.Name)
	}
	var ret golibvirt.NetworkGetDhcpLeasesRet
	for _, l := range n.Leases {
		if len(args.Mac) == 0 || len(l.Mac) == 1 && l.Mac[0] == args.Mac[0] {
			ret.Leases = append(ret.Leases, l)
			ret.Ret++
		}
	}
	return ret, nil
}

func number(b bool) int32 {
	if b {
		return 1
	}
	return 0
}
