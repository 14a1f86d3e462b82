module crawl.example.com/egress/gcp

go 1.26.0

require crawl.example.com/egress v0.0.0

replace crawl.example.com/egress => ../
