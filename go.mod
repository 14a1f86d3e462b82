module crawl.example.com/egress

go 1.26.0

require (
	github.com/digitalocean/go-libvirt v0.0.0-20261013170128-efbbdf578ac8
	github.com/kdomanski/iso9660 v0.4.0
	golang.org/x/crypto v0.59.0
	libvirt.org/go/libvirtxml v1.12008.0
)

require golang.org/x/sys v0.50.0 // indirect
