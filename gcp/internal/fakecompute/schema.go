package fakecompute

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// Schema is Google's description of the Compute API, as far as it can be checked by machine.
type Schema struct {
	Parameters map[string]*property
	Schemas    map[string]*property
	Resources  map[string]*resource
	methods    []*method
}

type resource struct{ Methods map[string]*method }

type method struct {
	ID         string
	FlatPath   string
	HTTPMethod string
	Parameters map[string]*property
	Request    *reference
	Response   *reference
	path       *regexp.Regexp
	names      []string
}

type reference struct {
	Ref string `json:"$ref"`
}

type property struct {
	Ref                  string `json:"$ref"`
	Type                 string
	Format               string
	Location             string
	Pattern              string
	Required             bool
	ReadOnly             bool
	Description          string
	Enum                 []string
	Properties           map[string]*property
	AdditionalProperties *property
	Items                *property
	Annotations          struct{ Required []string }
}

// Load reads the schema that is shipped with the module google.golang.org/api, which is found with the go command in
// the current folder's module. It is read once in a process.
var Load = sync.OnceValues(func() (*Schema, error) {
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "google.golang.org/api").Output()
	if err != nil {
		return nil, fmt.Errorf("fakecompute: where google.golang.org/api is: %w", err)
	}
	text, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(out)), "compute", "v1", "compute-api.json"))
	if err != nil {
		return nil, fmt.Errorf("fakecompute: %w", err)
	}
	s := &Schema{}
	if err := json.Unmarshal(text, s); err != nil {
		return nil, fmt.Errorf("fakecompute: schema: %w", err)
	}
	variable := regexp.MustCompile(`\{(\w+)\}`)
	for _, r := range s.Resources {
		for _, m := range r.Methods {
			for _, v := range variable.FindAllStringSubmatch(m.FlatPath, -1) {
				m.names = append(m.names, v[1])
			}
			m.path = regexp.MustCompile("^" + variable.ReplaceAllString(m.FlatPath, `([^/]+)`) + "$")
			s.methods = append(s.methods, m)
		}
	}
	return s, nil
})

// match finds the method of a request and the values in its path. The one with the fewest variables wins.
func (s *Schema) match(verb, path string) (*method, map[string]string) {
	var best *method
	for _, m := range s.methods {
		if m.HTTPMethod == verb && m.path.MatchString(path) && (best == nil || len(m.names) < len(best.names)) {
			best = m
		}
	}
	if best == nil {
		return nil, nil
	}
	values := map[string]string{}
	for i, v := range best.path.FindStringSubmatch(path)[1:] {
		values[best.names[i]] = v
	}
	return best, values
}

// request returns what is wrong with a request.
func (s *Schema) request(r *http.Request, path string, body []byte) []string {
	m, values := s.match(r.Method, path)
	if m == nil {
		return []string{fmt.Sprintf("no method has %s %s", r.Method, path)}
	}
	var bad []string
	for name, v := range values {
		if p := m.Parameters[name]; p != nil && p.Pattern != "" && !regexp.MustCompile("^(?:"+p.Pattern+")$").MatchString(v) {
			bad = append(bad, fmt.Sprintf("%s: path parameter %s=%q does not match %s", m.ID, name, v, p.Pattern))
		}
	}
	query := r.URL.Query()
	for name, v := range query {
		p := m.Parameters[name]
		if p == nil {
			p = s.Parameters[name]
		}
		if p == nil {
			bad = append(bad, fmt.Sprintf("%s: unknown query parameter %s", m.ID, name))
			continue
		}
		if p.Type == "integer" {
			if _, err := strconv.Atoi(v[0]); err != nil {
				bad = append(bad, fmt.Sprintf("%s: query parameter %s=%q is no number", m.ID, name, v[0]))
			}
		}
	}
	for name, p := range m.Parameters {
		if p.Required && p.Location == "query" && query.Get(name) == "" {
			bad = append(bad, fmt.Sprintf("%s: query parameter %s is missing", m.ID, name))
		}
	}
	switch {
	case m.Request == nil && len(body) > 0:
		bad = append(bad, m.ID+": takes no body")
	case m.Request != nil:
		var v any
		if err := json.Unmarshal(body, &v); err != nil {
			return append(bad, fmt.Sprintf("%s: body: %v", m.ID, err))
		}
		bad = append(bad, s.check(m.ID, m.Request.Ref, &property{Ref: m.Request.Ref}, v, true)...)
	}
	return bad
}

// response returns what is wrong with an answer of ours.
func (s *Schema) response(verb, path string, answer any) []string {
	m, _ := s.match(verb, path)
	if m == nil || m.Response == nil {
		return nil
	}
	return s.check(m.ID, m.Response.Ref, &property{Ref: m.Response.Ref}, answer, false)
}

func (s *Schema) check(id, at string, p *property, v any, sent bool) []string {
	if p.Ref != "" {
		p = s.Schemas[p.Ref]
	}
	wrong := func(format string, args ...any) []string {
		return []string{fmt.Sprintf("%s: %s: %s", id, at, fmt.Sprintf(format, args...))}
	}
	var bad []string
	switch p.Type {
	case "object":
		object, ok := v.(map[string]any)
		if !ok {
			return wrong("is %T, want an object", v)
		}
		for k, item := range object {
			q := p.Properties[k]
			if q == nil {
				q = p.AdditionalProperties
			}
			if q == nil {
				bad = append(bad, wrong("unknown property %s", k)...)
				continue
			}
			if sent && (q.ReadOnly || strings.HasPrefix(q.Description, "[Output Only]")) {
				bad = append(bad, wrong("%s is for output only", k)...)
			}
			bad = append(bad, s.check(id, at+"."+k, q, item, sent)...)
		}
		for k, q := range p.Properties {
			if _, ok := object[k]; sent && !ok && slices.Contains(q.Annotations.Required, id) {
				bad = append(bad, wrong("%s is missing", k)...)
			}
		}
	case "array":
		list, ok := v.([]any)
		if !ok {
			return wrong("is %T, want an array", v)
		}
		for i, item := range list {
			bad = append(bad, s.check(id, fmt.Sprintf("%s[%d]", at, i), p.Items, item, sent)...)
		}
	case "string":
		text, ok := v.(string)
		if !ok {
			return wrong("is %T, want a string (64-bit numbers travel as strings)", v)
		}
		if len(p.Enum) > 0 && !slices.Contains(p.Enum, text) {
			bad = append(bad, wrong("%q is none of %v", text, p.Enum)...)
		}
		if p.Pattern != "" && !regexp.MustCompile("^(?:"+p.Pattern+")$").MatchString(text) {
			bad = append(bad, wrong("%q does not match %s", text, p.Pattern)...)
		}
		if p.Format == "int64" || p.Format == "uint64" {
			if _, err := strconv.ParseInt(text, 10, 64); err != nil {
				bad = append(bad, wrong("%q is no number", text)...)
			}
		}
	case "integer", "number":
		if _, ok := v.(float64); !ok {
			return wrong("is %T, want a number", v)
		}
	case "boolean":
		if _, ok := v.(bool); !ok {
			return wrong("is %T, want true or false", v)
		}
	}
	return bad
}

// mask is a parsed fields parameter: nil leaves everything.
type mask map[string]mask

// parseFields reads a fields parameter such as "items(id,disks/source),nextPageToken".
func parseFields(text string) (mask, error) {
	m, rest, err := parseMask(text)
	if err == nil && rest != "" {
		err = fmt.Errorf("fields: %q is left over", rest)
	}
	return m, err
}

func parseMask(text string) (mask, string, error) {
	m := mask{}
	for {
		end := strings.IndexAny(text, ",()/")
		if end < 0 {
			end = len(text)
		}
		if end == 0 {
			return nil, "", fmt.Errorf("fields: a name is missing before %q", text)
		}
		name := text[:end]
		text = text[end:]
		var below mask
		var err error
		switch {
		case strings.HasPrefix(text, "("):
			if below, text, err = parseMask(text[1:]); err == nil && !strings.HasPrefix(text, ")") {
				err = fmt.Errorf("fields: ) is missing")
			}
			if err != nil {
				return nil, "", err
			}
			text = text[1:]
		case strings.HasPrefix(text, "/"):
			end := strings.IndexAny(text[1:], ",()")
			if end < 0 {
				end = len(text) - 1
			}
			if below, _, err = parseMask(text[1 : end+1]); err != nil {
				return nil, "", err
			}
			text = text[end+1:]
		}
		m[name] = below
		if !strings.HasPrefix(text, ",") {
			return m, text, nil
		}
		text = text[1:]
	}
}

func (m mask) apply(v any) any {
	if m == nil {
		return v
	}
	switch v := v.(type) {
	case map[string]any:
		kept := map[string]any{}
		for k, below := range m {
			if item, ok := v[k]; ok {
				kept[k] = below.apply(item)
			}
		}
		return kept
	case []any:
		kept := make([]any, len(v))
		for i, item := range v {
			kept[i] = m.apply(item)
		}
		return kept
	}
	return v
}

// filterPattern is the only filter that the fake knows: labels.KEY = "VALUE".
var filterPattern = regexp.MustCompile(`^labels\.([-_a-z0-9]+) = "([-_a-z0-9]*)"$`)

func parseFilter(values url.Values) (key, value string, ok bool) {
	text := values.Get("filter")
	if text == "" {
		return "", "", true
	}
	m := filterPattern.FindStringSubmatch(text)
	if m == nil {
		return "", "", false
	}
	return m[1], m[2], true
}
