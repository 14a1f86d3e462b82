// Package fakecompute is the part of Google's Compute API that package gcp uses, in memory. With a [Schema] it holds
// every request and every answer against Google's own description, and the rules for labels and metadata that the
// description leaves out.
package fakecompute

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"sort"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Failure is an answer that a request gets instead of the right one.
type Failure struct {
	// Status is the HTTP status. Zero cuts the connection without an answer.
	Status int
	// Reason and Message are Google's.
	Reason, Message string
	// Done says that the request was carried out first.
	Done bool
}

// OperationFailure is how an insert ends late.
type OperationFailure struct {
	Code, Message string
	Status        int // httpErrorStatusCode; zero leaves it out, as Google does at times
}

// Config is a fake project.
type Config struct {
	// Schema checks all traffic. Defaults to none.
	Schema *Schema
	// Project is the only project. Required.
	Project string
	// Zones exist and are up. Required.
	Zones []string
	// OperationTime is how long inserts and deletes take. Defaults to none.
	OperationTime time.Duration
	// BootTime is how long an instance takes from made to running. Defaults to none.
	BootTime time.Duration
	// Intercept may spoil a request; method is as in "compute.instances.insert". It is called without any lock.
	// Defaults to none.
	Intercept func(method, zone, name string) *Failure
	// Operation may make an insert fail late. It must not call the fake. Defaults to none.
	Operation func(zone, name string) *OperationFailure
	// Addresses are the reserved external addresses, by region. Defaults to none.
	Addresses map[string][]string
	// ServiceAccount is given to instances although none was asked for. Defaults to none.
	ServiceAccount string
	// Address returns the external address of the instance with that number. Defaults to one of 198.18.0.0/15.
	Address func(number int) string
}

// Server is an http.Handler, safe for concurrent use.
type Server struct {
	config Config

	// mu guards what follows.
	mu         sync.Mutex
	number     int
	instances  map[string]*instance // by zone/name
	operations map[string]*operation
	requests   map[string]*operation // by request id
	counts     map[string]int        // by method
	violations []string
	zoneStatus map[string]string
	quotas     map[string][2]float64 // usage and limit
	missing    map[string]bool       // images and networks that don't exist
	partial    map[string]bool       // zones whose lists have a warning
}

type instance struct {
	body     map[string]any
	ready    time.Time // when it exists for all
	running  time.Time
	gone     time.Time // zero, or when a delete ends
	status   string    // overrides what follows from the times
	failsAt  time.Time // zero, or when the insert fails
	sequence int
}

type operation struct {
	body    map[string]any
	done    time.Time
	failure *OperationFailure
}

// New returns a fake.
func New(config Config) *Server {
	if config.Address == nil {
		config.Address = func(n int) string { return fmt.Sprintf("198.18.%d.%d", n/250, n%250+1) }
	}
	return &Server{
		config: config, instances: map[string]*instance{}, operations: map[string]*operation{}, requests: map[string]*operation{},
		counts: map[string]int{}, zoneStatus: map[string]string{}, missing: map[string]bool{}, partial: map[string]bool{},
		quotas: map[string][2]float64{"INSTANCES": {0, 100}, "CPUS": {0, 100}, "IN_USE_ADDRESSES": {0, 100}},
	}
}

// Set changes the configuration.
func (s *Server) Set(f func(*Config)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(&s.config)
}

// Violations returns every breach of the schema so far.
func (s *Server) Violations() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.violations)
}

// Count returns how many requests of a method came, as in "compute.instances.list".
func (s *Server) Count(method string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.counts[method]
}

// Instance returns the resource as Google would, or nil.
func (s *Server) Instance(zone, name string) map[string]any {
	s.mu.Lock()
	defer s.mu.Unlock()
	x := s.lookLocked(zone, name)
	if x == nil {
		return nil
	}
	return s.viewLocked(x)
}

// Len returns the number of instances.
func (s *Server) Len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for _, key := range slices.Collect(maps.Keys(s.instances)) {
		zone, name, _ := strings.Cut(key, "/")
		if s.lookLocked(zone, name) != nil {
			n++
		}
	}
	return n
}

// Add makes a running instance without asking anybody and returns its number.
func (s *Server) Add(zone, name string, labels map[string]string) uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	given := map[string]any{}
	for k, v := range labels {
		given[k] = v
	}
	x := s.makeLocked(zone, map[string]any{"name": name, "labels": given, "networkInterfaces": []any{map[string]any{}}})
	x.ready, x.running = time.Time{}, time.Time{}
	id, _ := strconv.ParseUint(x.body["id"].(string), 10, 64)
	return id
}

// Status gives an instance a status for good, such as "TERMINATED".
func (s *Server) Status(zone, name, status string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.instances[zone+"/"+name].status = status
}

// Readdress gives an instance another ephemeral address, as a stop and a start do.
func (s *Server) Readdress(zone, name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.number++
	s.addressLocked(s.instances[zone+"/"+name].body, s.number)
}

// Vanish removes an instance, as a preemption with deletion does.
func (s *Server) Vanish(zone, name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.instances, zone+"/"+name)
}

// SetZone gives a zone a status such as "DOWN".
func (s *Server) SetZone(zone, status string) { s.change(func() { s.zoneStatus[zone] = status }) }

// SetQuota gives a quota its use and its limit.
func (s *Server) SetQuota(metric string, usage, limit float64) {
	s.change(func() { s.quotas[metric] = [2]float64{usage, limit} })
}

// SetMissing hides an image or a network by its name.
func (s *Server) SetMissing(name string, missing bool) {
	s.change(func() { s.missing[name] = missing })
}

// SetPartial makes a zone's lists incomplete.
func (s *Server) SetPartial(zone string, partial bool) {
	s.change(func() { s.partial[zone] = partial })
}

func (s *Server) change(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

// reply is an answer: a resource, or a failure.
type reply struct {
	body    any
	failure *Failure
}

func fail(status int, reason, format string, args ...any) reply {
	return reply{failure: &Failure{Status: status, Reason: reason, Message: fmt.Sprintf(format, args...)}}
}

var paths = []struct {
	verb   string
	path   *regexp.Regexp
	method string
}{
	{"POST", regexp.MustCompile(`^zones/([^/]+)/instances$`), "compute.instances.insert"},
	{"GET", regexp.MustCompile(`^zones/([^/]+)/instances$`), "compute.instances.list"},
	{"GET", regexp.MustCompile(`^zones/([^/]+)/instances/([^/]+)$`), "compute.instances.get"},
	{"DELETE", regexp.MustCompile(`^zones/([^/]+)/instances/([^/]+)$`), "compute.instances.delete"},
	{"POST", regexp.MustCompile(`^zones/([^/]+)/operations/([^/]+)/wait$`), "compute.zoneOperations.wait"},
	{"GET", regexp.MustCompile(`^zones/([^/]+)$`), "compute.zones.get"},
	{"GET", regexp.MustCompile(`^regions/([^/]+)$`), "compute.regions.get"},
	{"GET", regexp.MustCompile(`^regions/([^/]+)/addresses$`), "compute.addresses.list"},
	{"GET", regexp.MustCompile(`^global/images/(family)/([^/]+)$`), "compute.images.getFromFamily"},
	{"GET", regexp.MustCompile(`^global/images/()([^/]+)$`), "compute.images.get"},
	{"GET", regexp.MustCompile(`^global/networks/()([^/]+)$`), "compute.networks.get"},
	{"GET", regexp.MustCompile(`^regions/([^/]+)/subnetworks/([^/]+)$`), "compute.subnetworks.get"},
}

// ServeHTTP answers one request.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	path, ok := strings.CutPrefix(r.URL.Path, "/compute/v1/")
	if err != nil || !ok {
		http.Error(w, "fakecompute: no such path", http.StatusNotFound)
		return
	}
	s.mu.Lock()
	config := s.config
	s.mu.Unlock()
	if config.Schema != nil {
		s.violate(config.Schema.request(r, path, body)...)
	}
	project, rest, _ := strings.Cut(strings.TrimPrefix(path, "projects/"), "/")
	var method, zone, name string
	for _, p := range paths {
		if m := p.path.FindStringSubmatch(rest); m != nil && r.Method == p.verb {
			method, zone = p.method, m[1]
			if len(m) > 2 {
				name = m[2]
			}
			break
		}
	}
	if method == "compute.instances.insert" {
		var named struct{ Name string }
		json.Unmarshal(body, &named)
		name = named.Name
	}
	s.mu.Lock()
	s.counts[method]++
	s.mu.Unlock()
	var spoiled *Failure
	if config.Intercept != nil {
		spoiled = config.Intercept(method, zone, name)
	}
	if spoiled != nil && !spoiled.Done {
		s.refuse(w, spoiled)
		return
	}
	answer := s.answer(r, project, method, zone, name, body)
	if spoiled != nil {
		s.refuse(w, spoiled)
		return
	}
	if answer.failure != nil {
		s.refuse(w, answer.failure)
		return
	}
	// The schema wants plain JSON values.
	text, _ := json.Marshal(answer.body)
	var plain any
	json.Unmarshal(text, &plain)
	if config.Schema != nil {
		s.violate(config.Schema.response(r.Method, path, plain)...)
	}
	if fields := r.URL.Query().Get("fields"); fields != "" {
		m, err := parseFields(fields)
		if err != nil {
			s.violate(err.Error())
		}
		plain = m.apply(plain)
	}
	w.Header().Set("Content-Type", "application/json; charset=UTF-8")
	json.NewEncoder(w).Encode(plain)
}

func (s *Server) violate(found ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.violations = append(s.violations, found...)
}

func (s *Server) refuse(w http.ResponseWriter, f *Failure) {
	if f.Status == 0 {
		panic(http.ErrAbortHandler)
	}
	w.Header().Set("Content-Type", "application/json; charset=UTF-8")
	w.WriteHeader(f.Status)
	json.NewEncoder(w).Encode(map[string]any{"error": map[string]any{
		"code": f.Status, "message": f.Message,
		"errors": []any{map[string]any{"domain": "global", "reason": f.Reason, "message": f.Message}},
	}})
}

func (s *Server) answer(r *http.Request, project, method, zone, name string, body []byte) reply {
	if method == "compute.zoneOperations.wait" {
		s.await(r, name)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if project != s.config.Project && !strings.HasPrefix(method, "compute.images.") {
		return fail(404, "notFound", "The resource 'projects/%s' was not found", project)
	}
	if strings.Contains(r.URL.Path, "/zones/") && !slices.Contains(s.config.Zones, zone) {
		return fail(404, "notFound", "The resource 'projects/%s/zones/%s' was not found", project, zone)
	}
	if s.missing[name] {
		return fail(404, "notFound", "The resource '%s' was not found", strings.TrimPrefix(r.URL.Path, "/compute/v1/"))
	}
	switch method {
	case "compute.instances.insert":
		return s.insertLocked(r, zone, name, body)
	case "compute.instances.get":
		if x := s.lookLocked(zone, name); x != nil {
			return reply{body: s.viewLocked(x)}
		}
		return fail(404, "notFound", "The resource 'projects/%s/zones/%s/instances/%s' was not found", project, zone, name)
	case "compute.instances.list":
		return s.listLocked(r, zone)
	case "compute.instances.delete":
		return s.deleteLocked(r, zone, name)
	case "compute.zoneOperations.wait":
		if op := s.operations[name]; op != nil {
			return reply{body: s.operationLocked(op)}
		}
	case "compute.zones.get":
		status := s.zoneStatus[zone]
		if status == "" {
			status = "UP"
		}
		return reply{body: map[string]any{"kind": "compute#zone", "name": zone, "status": status}}
	case "compute.regions.get":
		var quotas []any
		for _, metric := range slices.Sorted(maps.Keys(s.quotas)) {
			quotas = append(quotas, map[string]any{"metric": metric, "usage": s.quotas[metric][0], "limit": s.quotas[metric][1]})
		}
		return reply{body: map[string]any{"kind": "compute#region", "name": zone, "status": "UP", "quotas": quotas}}
	case "compute.addresses.list":
		items := []any{}
		for _, a := range s.config.Addresses[zone] {
			status := "RESERVED"
			if s.usedLocked(a) {
				status = "IN_USE"
			}
			items = append(items, map[string]any{"address": a, "status": status, "addressType": "EXTERNAL"})
		}
		return reply{body: map[string]any{"kind": "compute#addressList", "items": items}}
	case "compute.images.getFromFamily", "compute.images.get":
		return reply{body: map[string]any{"kind": "compute#image", "name": name, "status": "READY"}}
	case "compute.networks.get":
		return reply{body: map[string]any{"kind": "compute#network", "name": name}}
	case "compute.subnetworks.get":
		return reply{body: map[string]any{"kind": "compute#subnetwork", "name": name, "stackType": "IPV4_IPV6"}}
	}
	return fail(404, "notFound", "The resource '%s' was not found", r.URL.Path)
}

// await holds the request until the operation ends.
func (s *Server) await(r *http.Request, name string) {
	s.mu.Lock()
	op := s.operations[name]
	s.mu.Unlock()
	if op == nil {
		return
	}
	timer := time.NewTimer(time.Until(op.done))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-r.Context().Done():
	}
}

func (s *Server) lookLocked(zone, name string) *instance {
	x := s.instances[zone+"/"+name]
	if x == nil {
		return nil
	}
	now := time.Now()
	if !x.gone.IsZero() && !now.Before(x.gone) || !x.failsAt.IsZero() && !now.Before(x.failsAt) {
		delete(s.instances, zone+"/"+name)
		return nil
	}
	return x
}

func (s *Server) viewLocked(x *instance) map[string]any {
	view := maps.Clone(x.body)
	now := time.Now()
	switch {
	case x.status != "":
		view["status"] = x.status
	case !x.gone.IsZero():
		view["status"] = "STOPPING"
	case now.Before(x.ready):
		view["status"] = "PROVISIONING"
	case now.Before(x.running):
		view["status"] = "STAGING"
	default:
		view["status"] = "RUNNING"
	}
	return view
}

func (s *Server) makeLocked(zone string, body map[string]any) *instance {
	s.number++
	now := time.Now()
	body["id"] = strconv.Itoa(1_000_000 + s.number)
	body["kind"] = "compute#instance"
	body["creationTimestamp"] = now.Format(time.RFC3339)
	s.addressLocked(body, s.number)
	if s.config.ServiceAccount != "" {
		body["serviceAccounts"] = []any{map[string]any{"email": s.config.ServiceAccount, "scopes": []any{}}}
	}
	x := &instance{body: body, sequence: s.number}
	x.ready = now.Add(s.config.OperationTime)
	x.running = x.ready.Add(s.config.BootTime)
	s.instances[zone+"/"+body["name"].(string)] = x
	return x
}

// addressLocked fills in the addresses, and leaves static ones alone.
func (s *Server) addressLocked(body map[string]any, n int) {
	first := body["networkInterfaces"].([]any)[0].(map[string]any)
	first["networkIP"] = fmt.Sprintf("10.128.%d.%d", n/250, n%250+1)
	access, _ := first["accessConfigs"].([]any)
	for _, a := range access {
		a := a.(map[string]any)
		given, _ := a["natIP"].(string)
		if given == "" || !s.reservedLocked(given) {
			a["natIP"] = s.config.Address(n)
		}
	}
}

func (s *Server) reservedLocked(address string) bool {
	for _, list := range s.config.Addresses {
		if slices.Contains(list, address) {
			return true
		}
	}
	return false
}

func (s *Server) usedLocked(address string) bool {
	for key := range s.instances {
		zone, name, _ := strings.Cut(key, "/")
		if x := s.lookLocked(zone, name); x != nil && addressOf(x.body) == address {
			return true
		}
	}
	return false
}

func addressOf(body map[string]any) string {
	first, _ := body["networkInterfaces"].([]any)[0].(map[string]any)
	access, _ := first["accessConfigs"].([]any)
	if len(access) == 0 {
		return ""
	}
	natIP, _ := access[0].(map[string]any)["natIP"].(string)
	return natIP
}

var (
	uuidPattern = regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$`)
	keyPattern  = regexp.MustCompile(`^[a-z][-_a-z0-9]{0,62}$`)
	textPattern = regexp.MustCompile(`^[-_a-z0-9]{0,63}$`)
)

func (s *Server) insertLocked(r *http.Request, zone, name string, text []byte) reply {
	id := r.URL.Query().Get("requestId")
	if !uuidPattern.MatchString(id) || strings.Trim(id, "0-") == "" {
		return fail(400, "invalid", "Invalid value for field 'requestId': '%s'. Must be a valid UUID", id)
	}
	if op := s.requests[id]; op != nil {
		return reply{body: s.operationLocked(op)}
	}
	var body map[string]any
	if err := json.Unmarshal(text, &body); err != nil {
		return fail(400, "parseError", "%v", err)
	}
	if f := checkByHand(body); f != nil {
		return reply{failure: f}
	}
	if s.lookLocked(zone, name) != nil {
		return fail(409, "alreadyExists", "The resource 'projects/%s/zones/%s/instances/%s' already exists", s.config.Project, zone, name)
	}
	op := s.operateLocked(zone, name, "insert", id)
	if a := addressOf(body); a != "" && s.usedLocked(a) {
		op.failure = &OperationFailure{Code: "IP_IN_USE_BY_ANOTHER_RESOURCE", Message: "IP '" + a + "' is already being used by another resource.", Status: 400}
	}
	if s.config.Operation != nil && op.failure == nil {
		op.failure = s.config.Operation(zone, name)
	}
	if op.failure != nil && s.config.OperationTime == 0 {
		return reply{body: s.operationLocked(op)}
	}
	x := s.makeLocked(zone, body)
	op.body["targetId"] = x.body["id"]
	if op.failure != nil {
		x.failsAt = op.done
	}
	return reply{body: s.operationLocked(op)}
}

// checkByHand is what the schema does not say about labels and metadata.
func checkByHand(body map[string]any) *Failure {
	labels, _ := body["labels"].(map[string]any)
	for k, v := range labels {
		if text, ok := v.(string); !ok || !keyPattern.MatchString(k) || !textPattern.MatchString(text) || len(labels) > 64 {
			return &Failure{Status: 400, Reason: "invalid", Message: fmt.Sprintf("Invalid value for field 'resource.labels': '%s=%v'", k, v)}
		}
	}
	metadata, _ := body["metadata"].(map[string]any)
	items, _ := metadata["items"].([]any)
	total := 0
	for i, item := range items {
		item, _ := item.(map[string]any)
		key, _ := item["key"].(string)
		value, _ := item["value"].(string)
		total += len(key) + len(value)
		if len(value) > 262144 || total >= 512*1024 {
			return &Failure{Status: 413, Reason: "invalid", Message: fmt.Sprintf("Value for field 'resource.metadata.items[%d].value' is too large: '%.100s'", i, value)}
		}
	}
	return nil
}

func (s *Server) operateLocked(zone, name, kind, requestID string) *operation {
	s.number++
	op := &operation{done: time.Now().Add(s.config.OperationTime), body: map[string]any{
		"kind": "compute#operation", "id": strconv.Itoa(9_000_000 + s.number), "name": fmt.Sprintf("operation-%d", s.number),
		"operationType": kind, "clientOperationId": requestID, "zone": "zones/" + zone, "progress": 0,
		"targetLink": "projects/" + s.config.Project + "/zones/" + zone + "/instances/" + name,
	}}
	s.operations[op.body["name"].(string)] = op
	if requestID != "" {
		s.requests[requestID] = op
	}
	return op
}

func (s *Server) operationLocked(op *operation) map[string]any {
	view := maps.Clone(op.body)
	if time.Now().Before(op.done) {
		view["status"] = "RUNNING"
		return view
	}
	view["status"], view["progress"] = "DONE", 100
	if f := op.failure; f != nil {
		view["error"] = map[string]any{"errors": []any{map[string]any{"code": f.Code, "message": f.Message}}}
		if f.Status != 0 {
			view["httpErrorStatusCode"], view["httpErrorMessage"] = f.Status, http.StatusText(f.Status)
		}
	}
	return view
}

func (s *Server) deleteLocked(r *http.Request, zone, name string) reply {
	id := r.URL.Query().Get("requestId")
	if op := s.requests[id]; id != "" && op != nil {
		return reply{body: s.operationLocked(op)}
	}
	x := s.lookLocked(zone, name)
	if x == nil {
		return fail(404, "notFound", "The resource 'projects/%s/zones/%s/instances/%s' was not found", s.config.Project, zone, name)
	}
	if protected, _ := x.body["deletionProtection"].(bool); protected {
		return fail(400, "invalid", "Invalid resource usage: 'Resource cannot be deleted if it's protected against deletion.'")
	}
	op := s.operateLocked(zone, name, "delete", id)
	if x.gone.IsZero() {
		x.gone = op.done
	}
	s.lookLocked(zone, name)
	return reply{body: s.operationLocked(op)}
}

func (s *Server) listLocked(r *http.Request, zone string) reply {
	q := r.URL.Query()
	key, value, ok := parseFilter(q)
	if !ok {
		return fail(400, "invalid", "Invalid value for field 'filter': '%s'", q.Get("filter"))
	}
	var found []*instance
	for _, k := range slices.Collect(maps.Keys(s.instances)) {
		in, name, _ := strings.Cut(k, "/")
		x := s.lookLocked(in, name)
		if in != zone || x == nil {
			continue
		}
		labels, _ := x.body["labels"].(map[string]any)
		if key == "" || labels[key] == value {
			found = append(found, x)
		}
	}
	sort.Slice(found, func(i, j int) bool { return found[i].sequence < found[j].sequence })
	size := 500
	if n, err := strconv.Atoi(q.Get("maxResults")); err == nil && n > 0 && n < size {
		size = n
	}
	from, _ := strconv.Atoi(q.Get("pageToken"))
	end := min(from+size, len(found))
	items := []any{}
	for _, x := range found[min(from, end):end] {
		items = append(items, s.viewLocked(x))
	}
	page := map[string]any{"kind": "compute#instanceList", "items": items}
	if end < len(found) {
		page["nextPageToken"] = strconv.Itoa(end)
	}
	if s.partial[zone] {
		page["warning"] = map[string]any{"code": "UNREACHABLE", "message": "a part of the zone did not answer"}
	}
	return reply{body: page}
}
