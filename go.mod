module crawl.example.com/egress

go 1.26.0

require (
	github.com/kdomanski/iso9660 v0.4.0
	golang.org/x/crypto v0.59.0
)

require (
	github.com/stretchr/testify v1.11.1 // indirect
	golang.org/x/sys v0.50.0 // indirect
)
