module crawl.example.com/egress

go 1.26.0

require (
	github.com/digitalocean/go-libvirt v0.0.0-20261013170128-efbbdf578ac8
	github.com/kdomanski/iso9660 v0.4.0
	github.com/luthermonson/go-proxmox v0.9.0
	golang.org/x/crypto v0.59.0
	libvirt.org/go/libvirtxml v1.12008.0
)

require (
	github.com/buger/goterm v1.0.4 // indirect
	github.com/diskfs/go-diskfs v1.9.3 // indirect
	github.com/djherbis/times v1.6.0 // indirect
	github.com/gorilla/websocket v1.4.2 // indirect
	github.com/jinzhu/copier v0.3.4 // indirect
	github.com/magefile/mage v1.14.0 // indirect
	golang.org/x/sys v0.50.0 // indirect
)
