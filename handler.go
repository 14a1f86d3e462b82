package egress

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"html/template"
	"maps"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Handler returns an HTTP handler that shows how the pool is:
//
//   - healthz is for load balancers and supervisors: 200 while the pool is started and at least one proxy is ready or none
//     is wanted, else 503. The body is one line of plain text that says why.
//   - status.json is a [StatusReport].
//   - / is the same for a person: a page without scripts that loads itself again every few seconds. It shows no more
//     than 500 proxies, those in trouble before those that are ready.
//
// It answers GET and HEAD, never blocks and changes nothing, and may be used before Start and after Close. All links are
// relative, so it may be mounted below a prefix:
//
//	mux.Handle("/egress/", http.StripPrefix("/egress", pool.Handler()))
//
// It has no authentication: bind it to loopback or put it behind something that has. It shows names, labels, addresses and
// the backends' messages, and never a secret: no credentials, no documents, and no spec hashes, which would confirm a
// guess at a document.
func (p *Pool) Handler() http.Handler {
	// The template is parsed here and not in a variable, so that programs without a status page are not larger for it.
	return &statusHandler{
		pool:   p,
		page:   template.Must(template.New("page").Parse(statusPage)),
		policy: "default-src 'none'; style-src '" + styleHash(statusPage) + "'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
	}
}

// StatusReport is the answer of status.json. Fields may be added to it, and none changes its name or meaning. Durations are
// in seconds and times in RFC 3339; what is not known is left out. Each list is as of its own instant.
type StatusReport struct {
	// Pool is Config.Name.
	Pool string `json:"pool"`
	// Time is when the report was made.
	Time time.Time `json:"time"`
	// State is new, started, closing or closed.
	State string `json:"state"`
	// Healthy is whether healthz answers 200, and Health its text.
	Healthy bool   `json:"healthy"`
	Health  string `json:"health"`
	// Suspect is true while most proxies fail at once and nothing unhealthy is replaced.
	Suspect bool `json:"suspect"`
	// Leases, Instances and Probes are the counters of [Stats].
	Leases    LeaseReport    `json:"leases"`
	Instances InstanceReport `json:"instances"`
	Probes    ProbeReport    `json:"probes"`
	// Providers are in the order of Config.Providers.
	Providers []ProviderReport `json:"providers"`
	// Proxies are sorted by name. Those on their way out are among them.
	Proxies []ProxyReport `json:"proxies"`
}

// LeaseReport counts leases; see [Stats].
type LeaseReport struct {
	Held             int     `json:"held"`
	Waiting          int     `json:"waiting"`
	Granted          uint64  `json:"granted"`
	Waited           uint64  `json:"waited"`
	Exhausted        uint64  `json:"exhausted"`
	Revoked          uint64  `json:"revoked"`
	Leaked           uint64  `json:"leaked"`
	WaitTotalSeconds float64 `json:"wait_total_seconds"`
	WaitMaxSeconds   float64 `json:"wait_max_seconds"`
}

// InstanceReport counts instances; see [Stats]. Wanted and Ready count proxies.
type InstanceReport struct {
	Wanted        int    `json:"wanted"`
	Ready         int    `json:"ready"`
	Known         int    `json:"known"`
	Created       uint64 `json:"created"`
	CreateErrors  uint64 `json:"create_errors"`
	Deleted       uint64 `json:"deleted"`
	Adopted       uint64 `json:"adopted"`
	Replaced      uint64 `json:"replaced"`
	ProviderCalls uint64 `json:"provider_calls"`
}

// ProbeReport counts probes; see [Stats].
type ProbeReport struct {
	Done   uint64 `json:"done"`
	Failed uint64 `json:"failed"`
}

// ProviderReport is how one provider is.
type ProviderReport struct {
	Name string `json:"name"`
	// Listed is when its newest good list ended, and ListError why the one after that failed.
	Listed    time.Time `json:"listed,omitzero"`
	ListError string    `json:"list_error,omitempty"`
	// Denied is true while it refuses creates for want of a right, Full while it has no room for
	// another instance.
	Denied bool `json:"denied"`
	Full   bool `json:"full"`
	// Targets are the results of its checks; see [TargetStatus].
	Targets []TargetReport `json:"targets"`
}

// TargetReport is what is known of one target of a provider; see [TargetStatus].
type TargetReport struct {
	Target          string    `json:"target"`
	Ready           bool      `json:"ready"`
	Since           time.Time `json:"since"`
	Reason          string    `json:"reason"`
	Message         string    `json:"message,omitempty"`
	Checked         time.Time `json:"checked"`
	DurationSeconds float64   `json:"duration_seconds"`
}

// ProxyReport is how one proxy is; see [ProxyStatus].
type ProxyReport struct {
	Name       string               `json:"name"`
	Mode       string               `json:"mode"`
	Provider   string               `json:"provider,omitempty"`
	Labels     map[string]string    `json:"labels,omitempty"`
	Wanted     bool                 `json:"wanted"`
	Phase      Phase                `json:"phase"`
	Since      time.Time            `json:"since"`
	Reason     string               `json:"reason,omitempty"`
	Message    string               `json:"message,omitempty"`
	Instance   string               `json:"instance,omitempty"`
	Generation int64                `json:"generation,omitempty"`
	Address    string               `json:"address,omitempty"`
	Host       string               `json:"host,omitempty"`
	Leases     int                  `json:"leases"`
	MaxLeases  int                  `json:"max_leases"`
	Granted    uint64               `json:"granted"`
	Failures   uint64               `json:"failures"`
	Cooling    map[string]time.Time `json:"cooling,omitempty"`
	LastProbe  *ProbeResultReport   `json:"last_probe,omitempty"`
	EgressIP   netip.Addr           `json:"egress_ip,omitzero"`
}

// ProbeResultReport is the outcome of one probe; see [ProbeResult].
type ProbeResultReport struct {
	Time            time.Time `json:"time"`
	OK              bool      `json:"ok"`
	Reason          string    `json:"reason"`
	Message         string    `json:"message,omitempty"`
	DurationSeconds float64   `json:"duration_seconds"`
}

//go:embed handler.html
var statusPage string

// styleHash names the page's one style sheet in a Content-Security-Policy, so that no other is allowed.
func styleHash(page string) string {
	_, rest, _ := strings.Cut(page, "<style>")
	style, _, _ := strings.Cut(rest, "</style>")
	sum := sha256.Sum256([]byte(style))
	return "sha256-" + base64.StdEncoding.EncodeToString(sum[:])
}

type statusHandler struct {
	pool   *Pool
	page   *template.Template
	policy string
}

// ServeHTTP implements http.Handler.
func (h *statusHandler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	header := w.Header()
	header.Set("Cache-Control", "no-store")
	header.Set("Content-Security-Policy", h.policy)
	header.Set("X-Content-Type-Options", "nosniff")
	header.Set("Referrer-Policy", "no-referrer")
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		header.Set("Allow", "GET, HEAD")
		http.Error(w, "method not allowed, want GET or HEAD", http.StatusMethodNotAllowed)
		return
	}
	status, kind := http.StatusOK, "text/plain; charset=utf-8"
	var body bytes.Buffer
	var err error
	switch strings.TrimPrefix(r.URL.Path, "/") {
	case "healthz":
		healthy, text := h.pool.health()
		if !healthy {
			status = http.StatusServiceUnavailable
		}
		body.WriteString(text + "\n")
	case "status.json":
		kind = "application/json"
		out := json.NewEncoder(&body)
		out.SetIndent("", "  ")
		err = out.Encode(h.pool.report())
	case "":
		kind = "text/html; charset=utf-8"
		err = h.page.Execute(&body, viewOf(h.pool.report()))
	default:
		http.Error(w, "not found, want /, healthz or status.json", http.StatusNotFound)
		return
	}
	if err != nil {
		h.pool.logger.Error("the status can't be shown", "path", r.URL.Path, "error", err)
		http.Error(w, "the status can't be shown", http.StatusInternalServerError)
		return
	}
	header.Set("Content-Type", kind)
	header.Set("Content-Length", strconv.Itoa(body.Len()))
	w.WriteHeader(status)
	_, _ = w.Write(body.Bytes()) // a client that has gone away has nothing to be told
}

// health says whether the pool can do its work, and why not in one line.
func (p *Pool) health() (healthy bool, text string) {
	switch p.state.Load() {
	case stateNew:
		return false, "the pool is not started"
	case stateClosing, stateClosed:
		return false, "the pool is closed"
	}
	wanted, ready := 0, 0
	others := map[string]int{}
	p.mu.Lock()
	suspect := !p.suspectSince.IsZero()
	for _, m := range p.order {
		wanted++
		if Phase(m.status.Phase) == PhaseReady {
			ready++
			continue
		}
		what := string(m.status.Phase)
		if m.status.Why != "" {
			what += " (" + string(m.status.Why) + ")"
		}
		others[what]++
	}
	p.mu.Unlock()
	switch {
	case wanted == 0:
		return true, "ok: no proxy is wanted"
	case ready == 0:
		text = fmt.Sprintf("none of %d proxies is ready", wanted)
	default:
		text = fmt.Sprintf("ok: %d of %d proxies are ready", ready, wanted)
	}
	kinds := slices.SortedFunc(maps.Keys(others), func(a, b string) int {
		return cmp.Or(cmp.Compare(others[b], others[a]), cmp.Compare(a, b))
	})
	for i, what := range kinds {
		kinds[i] = fmt.Sprintf("%d %s", others[what], what)
	}
	if len(kinds) > 0 {
		text += "; " + strings.Join(kinds, ", ")
	}
	if suspect {
		text += "; most probes fail at once, so the probe site is suspect"
	}
	return ready > 0, text
}

// report takes a snapshot of everything that is shown.
func (p *Pool) report() StatusReport {
	s := p.Stats()
	r := StatusReport{
		Pool: p.config.Name, Time: time.Now(), Suspect: s.Suspect,
		State: [...]string{stateNew: "new", stateStarted: "started", stateClosing: "closing", stateClosed: "closed"}[p.state.Load()],
		Leases: LeaseReport{
			Held: s.Leases, Waiting: s.Waiting, Granted: s.Granted, Waited: s.Waited, Exhausted: s.Exhausted, Revoked: s.Revoked,
			Leaked: s.Leaked, WaitTotalSeconds: s.WaitTotal.Seconds(), WaitMaxSeconds: s.WaitMax.Seconds(),
		},
		Instances: InstanceReport{
			Wanted: s.Proxies, Ready: s.Ready, Known: s.Instances, Created: s.Created, CreateErrors: s.CreateErrors,
			Deleted: s.Deleted, Adopted: s.Adopted, Replaced: s.Replaced, ProviderCalls: s.ProviderCalls,
		},
		Probes:    ProbeReport{Done: s.Probes, Failed: s.ProbeErrors},
		Providers: p.providerReports(),
		Proxies:   []ProxyReport{},
	}
	r.Healthy, r.Health = p.health()
	for _, x := range p.Proxies() {
		r.Proxies = append(r.Proxies, proxyReport(&x))
	}
	return r
}

func (p *Pool) providerReports() []ProviderReport {
	p.mu.Lock()
	all := make([]ProviderReport, len(p.sources))
	errs := make([]error, len(p.sources))
	for i, s := range p.sources {
		all[i] = ProviderReport{Name: s.name, Listed: s.listedAt, Denied: s.denied, Full: s.full, Targets: []TargetReport{}}
		errs[i] = s.listErr
	}
	p.mu.Unlock()
	for i, err := range errs {
		if err != nil {
			all[i].ListError = err.Error() // a backend's method, so not under the lock
		}
	}
	for _, t := range p.ProviderHealth() {
		i := slices.IndexFunc(all, func(r ProviderReport) bool { return r.Name == t.Provider })
		if i < 0 {
			continue // its Name has changed, which no provider's may
		}
		all[i].Targets = append(all[i].Targets, TargetReport{
			Target: t.Target, Ready: t.Ready, Since: t.Since, Reason: string(t.Reason), Message: t.Message,
			Checked: t.CheckedAt, DurationSeconds: t.Duration.Seconds(),
		})
	}
	return all
}

func proxyReport(s *ProxyStatus) ProxyReport {
	r := ProxyReport{
		Name: s.Name, Mode: s.Mode.String(), Provider: s.Provider, Labels: s.Labels, Wanted: s.Wanted,
		Phase: s.Phase, Since: s.Since, Reason: s.Reason, Message: s.Message,
		Instance: s.Instance, Generation: s.Generation, Address: s.Address, Host: s.Host,
		Leases: s.Leases, MaxLeases: s.MaxLeases, Granted: s.Granted, Failures: s.Failures, Cooling: s.Cooling, EgressIP: s.EgressIP,
	}
	if b := s.LastProbe; !b.Time.IsZero() {
		r.LastProbe = &ProbeResultReport{Time: b.Time, OK: b.OK, Reason: b.Reason, Message: b.Message, DurationSeconds: b.Duration.Seconds()}
	}
	return r
}

// maxRows is how many proxies the page shows. More would be no help to a person and a burden to a phone.
const maxRows = 500

// statusView is what the page's template gets: a report, and what is easier to say in Go than in a template.
type statusView struct {
	StatusReport
	Rows []rowView
	Left int // proxies that are not among Rows
}

type rowView struct {
	ProxyReport
	Class string   // the phase's colour
	Tags  []string // labels
	Bans  []string // targets, and for how long
}

func viewOf(r StatusReport) statusView {
	v := statusView{StatusReport: r}
	troubled := 0
	for i := range r.Proxies {
		if r.Proxies[i].Phase != PhaseReady {
			troubled++
		}
	}
	// Those in trouble come first when not all can be shown, and all stay in the order of their names.
	places := map[bool]int{false: min(troubled, maxRows), true: maxRows - min(troubled, maxRows)}
	for i := range r.Proxies {
		x := &r.Proxies[i]
		if ready := x.Phase == PhaseReady; places[ready] > 0 {
			places[ready]--
			v.Rows = append(v.Rows, rowOf(x, r.Time))
		}
	}
	v.Left = len(r.Proxies) - len(v.Rows)
	return v
}

func rowOf(x *ProxyReport, now time.Time) rowView {
	row := rowView{ProxyReport: *x, Class: "busy"}
	switch x.Phase {
	case PhaseReady:
		row.Class = "good"
	case PhaseUnhealthy, PhaseFailed:
		row.Class = "bad"
	}
	for _, k := range slices.Sorted(maps.Keys(x.Labels)) {
		row.Tags = append(row.Tags, k+"="+x.Labels[k])
	}
	for _, target := range slices.Sorted(maps.Keys(x.Cooling)) {
		name := target
		if name == "" {
			name = "no target"
		}
		row.Bans = append(row.Bans, name+" for "+roughly(x.Cooling[target].Sub(now)))
	}
	return row
}

// Ago says how long before the report t was.
func (v statusView) Ago(t time.Time) string { return roughly(v.Time.Sub(t)) }

// Took is a duration in seconds as a person would say it.
func (v statusView) Took(seconds float64) string {
	d := time.Duration(seconds * float64(time.Second))
	if d < time.Second {
		return strconv.FormatInt(d.Milliseconds(), 10) + "\u00a0ms"
	}
	return strconv.FormatFloat(seconds, 'f', 1, 64) + "\u00a0s"
}

// roughly is a duration as a person would say it. Its blank does not break lines.
func roughly(d time.Duration) string {
	switch {
	case d < time.Minute:
		return strconv.Itoa(max(0, int(d/time.Second))) + "\u00a0s"
	case d < time.Hour:
		return strconv.Itoa(int(d/time.Minute)) + "\u00a0min"
	case d < 48*time.Hour:
		return strconv.Itoa(int(d/time.Hour)) + "\u00a0h"
	}
	return strconv.Itoa(int(d/(24*time.Hour))) + "\u00a0d"
}
