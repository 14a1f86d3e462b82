module crawl.example.com/egress

go 1.26.0

require github.com/kdomanski/iso9660 v0.4.0

require github.com/stretchr/testify v1.11.1 // indirect
