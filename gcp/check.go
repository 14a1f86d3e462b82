package gcp

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"cloud.google.com/go/compute/apiv1/computepb"

	"crawl.example.com/egress/provider"
)

// Check implements provider.Checker. Each zone of Config.Zones and Config.DrainZones is a target. It is ready when
// the credentials are taken, the zone is up, the region has quota for another instance, and the default image and
// the network are there. It sends four or five requests for each zone.
func (p *Provider) Check(ctx context.Context) []provider.TargetHealth {
	zones := p.zones()
	results := make([]provider.TargetHealth, len(zones))
	var checking sync.WaitGroup
	for i, zone := range zones {
		checking.Go(func() {
			begin := time.Now()
			h := provider.TargetHealth{Target: zone, Ready: true, Reason: provider.ReasonReady, Message: "zone, quota, image and network are fine"}
			if f := p.check(ctx, zone); f != nil {
				h.Ready, h.Reason, h.Message = false, f.reason, f.Error()
				if h.Reason == "" || h.Reason == provider.ReasonReady {
					h.Reason = provider.ReasonUnknown
				}
				if ctx.Err() != nil && f.code == 0 {
					h.Reason = provider.ReasonTimeout
				}
			}
			h.CheckedAt = time.Now()
			h.Duration = h.CheckedAt.Sub(begin)
			results[i] = h
		})
	}
	checking.Wait()
	return results
}

func (p *Provider) check(ctx context.Context, zone string) *fault {
	for _, look := range []func(context.Context, string) error{p.checkZone, p.checkQuota, p.checkImage, p.checkNetwork} {
		if err := look(ctx, zone); err != nil {
			return classify(err)
		}
	}
	return nil
}

// ask sends one request for a check, under a name that the log shows.
func (p *Provider) ask(ctx context.Context, method, target string, send func(context.Context, *clients) error) error {
	return p.do(ctx, call{method: method, target: target}, requestTimeout, send)
}

func (p *Provider) checkZone(ctx context.Context, zone string) error {
	var z *computepb.Zone
	err := p.ask(ctx, "zones.get", zone, func(ctx context.Context, c *clients) (err error) {
		z, err = c.zones.Get(ctx, &computepb.GetZoneRequest{Project: p.config.Project, Zone: zone}, once...)
		return err
	})
	if err != nil {
		return err
	}
	if z.GetStatus() != "UP" {
		return &fault{reason: provider.ReasonUnreachable, message: fmt.Sprintf("the zone is %s", z.GetStatus())}
	}
	return nil
}

// checkQuota looks whether the region has room for one more of everything that an instance counts against.
func (p *Provider) checkQuota(ctx context.Context, zone string) error {
	region := regionOf(zone)
	var r *computepb.Region
	err := p.ask(ctx, "regions.get", region, func(ctx context.Context, c *clients) (err error) {
		r, err = c.regions.Get(ctx, &computepb.GetRegionRequest{Project: p.config.Project, Region: region}, once...)
		return err
	})
	if err != nil {
		return err
	}
	needed := map[string]bool{"INSTANCES": true, "CPUS": !p.config.Spot, "IN_USE_ADDRESSES": p.config.External == ExternalEphemeral}
	for _, q := range r.GetQuotas() {
		if needed[q.GetMetric()] && q.GetUsage() >= q.GetLimit() {
			return &fault{reason: provider.ReasonQuotaExceeded,
				message: fmt.Sprintf("quota %s of %s is used up: %v of %v; have it raised or use another region", q.GetMetric(), region, q.GetUsage(), q.GetLimit())}
		}
	}
	return nil
}

func (p *Provider) checkImage(ctx context.Context, _ string) error {
	image := p.imagePath(p.config.Image)
	m := imagePattern.FindStringSubmatch(image)
	err := p.ask(ctx, "images.get", image, func(ctx context.Context, c *clients) error {
		if m[2] != "" {
			_, err := c.images.GetFromFamily(ctx, &computepb.GetFromFamilyImageRequest{Project: m[1], Family: m[3]}, once...)
			return err
		}
		_, err := c.images.Get(ctx, &computepb.GetImageRequest{Project: m[1], Image: m[3]}, once...)
		return err
	})
	if err == nil {
		return nil
	}
	if f := classify(err); errors.Is(f.kind, provider.ErrNotFound) {
		f.reason, f.message = provider.ReasonImageNotFound, "no image "+image
		return f
	}
	return err
}

func (p *Provider) checkNetwork(ctx context.Context, zone string) error {
	if p.config.Subnetwork != "" {
		m := subnetPattern.FindStringSubmatch(p.subnetworkPath(zone))
		if m[2] != regionOf(zone) {
			return &fault{reason: provider.ReasonUnsupported, message: fmt.Sprintf("Subnetwork is in %s, the zone is not", m[2])}
		}
		return p.ask(ctx, "subnetworks.get", strings.Join(m[1:], "/"), func(ctx context.Context, c *clients) error {
			_, err := c.subnetworks.Get(ctx, &computepb.GetSubnetworkRequest{Project: m[1], Region: m[2], Subnetwork: m[3]}, once...)
			return err
		})
	}
	m := networkPattern.FindStringSubmatch(p.networkPath())
	return p.ask(ctx, "networks.get", m[1]+"/"+m[2], func(ctx context.Context, c *clients) error {
		_, err := c.networks.Get(ctx, &computepb.GetNetworkRequest{Project: m[1], Network: m[2]}, once...)
		return err
	})
}
