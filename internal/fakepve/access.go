package fakepve

import (
	"crypto/subtle"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// token is an API token with privilege separation.
type token struct {
	id, secret string
	acl        map[string][]string // privileges by path
}

// AddToken makes an API token such as "egress@pve!crawl" without any privilege.
func (c *Cluster) AddToken(id, secret string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.tokens[id] = &token{id: id, secret: secret, acl: map[string][]string{}}
}

// SetSecret changes a token's secret.
func (c *Cluster) SetSecret(id, secret string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.tokens[id].secret = secret
}

// Grant replaces what a token may do at a path and below. No privileges at all hide what a path above grants, as the
// role NoAccess does.
func (c *Cluster) Grant(id, path string, privileges ...string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(privileges) == 0 {
		privileges = []string{noAccess}
	}
	c.tokens[id].acl[path] = privileges
}

// Revoke takes back what Grant gave at a path.
func (c *Cluster) Revoke(id, path string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.tokens[id].acl, path)
}

const noAccess = "-"

// authenticateLocked returns the token of an Authorization header. The real server unescapes the secret and cuts it at a
// semicolon.
func (c *Cluster) authenticateLocked(header string) *token {
	value, ok := strings.CutPrefix(header, "PVEAPIToken=")
	if !ok {
		return nil
	}
	id, secret, _ := strings.Cut(value, "=")
	secret, _, _ = strings.Cut(secret, ";")
	t := c.tokens[id]
	if t == nil || subtle.ConstantTimeCompare([]byte(t.secret), []byte(secret)) != 1 {
		return nil
	}
	return t
}

// permissionsLocked returns what a token may do at a path: the deepest entry counts, and what a pool gives is added.
func (c *Cluster) permissionsLocked(t *token, path string) []string {
	effective := func(path string) []string {
		for {
			if p, ok := t.acl[path]; ok {
				if slices.Contains(p, noAccess) {
					return nil
				}
				return p
			}
			if path == "/" {
				return nil
			}
			path = path[:strings.LastIndexByte(path, '/')]
			if path == "" {
				path = "/"
			}
		}
	}
	all := slices.Clone(effective(path))
	if id, ok := strings.CutPrefix(path, "/vms/"); ok && !slices.Contains(t.acl[path], noAccess) {
		n, _ := strconv.Atoi(id)
		if v := c.vms[n]; v != nil && v.pool != "" {
			all = append(all, effective("/pool/"+v.pool)...)
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

func (c *Cluster) mayLocked(t *token, path string, privileges ...string) bool {
	have := c.permissionsLocked(t, path)
	return slices.ContainsFunc(privileges, func(p string) bool { return slices.Contains(have, p) })
}

// needLocked returns a refusal unless the token has one of the privileges.
func (q *request) needLocked(path string, privileges ...string) *failure {
	if q.c.mayLocked(q.token, path, privileges...) {
		return nil
	}
	return &failure{status: 403, message: fmt.Sprintf("Permission check failed (%s, %s)", path, strings.Join(privileges, "|"))}
}

func getPermissions(q *request) (any, *failure) {
	answer := map[string]map[string]int{}
	add := func(path string) {
		privileges := map[string]int{}
		for _, p := range q.c.permissionsLocked(q.token, path) {
			privileges[p] = 1
		}
		if len(privileges) > 0 || q.params["path"] != "" {
			answer[path] = privileges
		}
	}
	if p := q.params["path"]; p != "" {
		add(p)
		return answer, nil
	}
	paths := append([]string{"/", "/access", "/access/groups", "/nodes", "/pool", "/sdn", "/storage", "/vms"},
		slices.Collect(maps.Keys(q.token.acl))...)
	for id, v := range q.c.vms {
		if v.pool != "" {
			paths = append(paths, "/vms/"+strconv.Itoa(id))
		}
	}
	for _, p := range paths {
		add(p)
	}
	return answer, nil
}
