package fakecompute

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

func TestTheSchemaCatchesWhatGoogleWouldRefuse(t *testing.T) {
	schema, err := Load()
	if err != nil {
		t.Skipf("Google's schema can't be found, as in a vendored build: %v", err)
	}
	const path = "projects/my-crawler/zones/europe-west3-a/instances"
	for body, want := range map[string]string{
		`{"name":"a"}`:                                                "",
		`{"name":"A"}`:                                                "does not match",
		`{"name":"a","colour":"red"}`:                                 "unknown property colour",
		`{"name":"a","status":"RUNNING"}`:                             "output only",
		`{"name":"a","disks":{}}`:                                     "want an array",
		`{"name":"a","deletionProtection":"yes"}`:                     "want true or false",
		`{"name":"a","disks":[{"diskSizeGb":10}]}`:                    "64-bit",
		`{"name":"a","labels":{"a":1}}`:                               "want a string",
		`{"name":"a","scheduling":{"provisioningModel":"SOMETIMES"}}`: "none of",
		`{`: "body",
	} {
		r := httptest.NewRequest(http.MethodPost, "/"+path, nil)
		got := strings.Join(schema.request(r, path, []byte(body)), "\n")
		if want == "" && got != "" || !strings.Contains(got, want) {
			t.Errorf("%s: %q, want %q", body, got, want)
		}
	}
	for _, target := range []string{"/" + path + "?unknown=1", "/" + path + "/Bad_Name", "/nothing"} {
		r := httptest.NewRequest(http.MethodGet, target, nil)
		if got := schema.request(r, strings.TrimPrefix(r.URL.Path, "/"), nil); len(got) == 0 {
			t.Errorf("%s passes", target)
		}
	}
	if got := schema.response(http.MethodGet, path+"/a", map[string]any{"no-such-property": "a"}); len(got) == 0 {
		t.Error("an unknown field in an answer passes")
	}
}

func FuzzFields(f *testing.F) {
	f.Add("items(id,networkInterfaces(accessConfigs/natIP)),nextPageToken")
	f.Fuzz(func(t *testing.T, text string) {
		if m, err := parseFields(text); err == nil {
			m.apply(map[string]any{"items": []any{map[string]any{"id": "1"}}})
		}
	})
}
