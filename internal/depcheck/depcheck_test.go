// Package depcheck pins what each package of this module makes a program depend on.
package depcheck

import (
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "rewrite testdata from what go list says")

// The modules behind each package a program may import. A change here is a change of what users pay.
var budgets = []string{".", "./provider", "./provider/fake", "./cloudinit", "./kvm", "./kvm2", "./proxmox"}

// stdOnly are those that must stay with the standard library and golang.org/x/sync.
var stdOnly = []string{".", "./provider", "./provider/fake", "./cloudinit"}

const module = "crawl.example.com/egress"

// goList runs go list -deps in the module's root, outside the workspace, as a user's build would see it.
func goList(t *testing.T, format string, patterns ...string) []string {
	t.Helper()
	cmd := exec.Command("go", append([]string{"list", "-deps", "-f", format}, patterns...)...)
	cmd.Dir = "../.."
	cmd.Env = append(os.Environ(), "GOWORK=off")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, stderr.String())
	}
	lines := strings.Fields(string(out))
	slices.Sort(lines)
	return slices.Compact(lines)
}

func modulesOf(t *testing.T, pkg string) []string {
	t.Helper()
	return slices.DeleteFunc(goList(t, "{{with .Module}}{{.Path}}{{end}}", pkg), func(m string) bool { return m == module })
}

func TestEachPackageNeedsTheModulesItIsPinnedTo(t *testing.T) {
	for _, pkg := range budgets {
		name := strings.ReplaceAll(strings.TrimPrefix(pkg, "./"), "/", "_")
		if pkg == "." {
			name = "egress"
		}
		t.Run(name, func(t *testing.T) {
			got := strings.Join(modulesOf(t, pkg), "\n")
			file := filepath.Join("testdata", name+".txt")
			if *update {
				if err := os.WriteFile(file, []byte(got+"\n"), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if strings.TrimSpace(string(want)) != strings.TrimSpace(got) {
				t.Errorf("%s needs\n%s\nbut is pinned to\n%s\nIf that is meant, run this test with -update.", pkg, got, want)
			}
		})
	}
}

func TestTheCoreNeedsOnlyTheStandardLibraryAndSync(t *testing.T) {
	for _, pkg := range stdOnly {
		for _, m := range modulesOf(t, pkg) {
			if m != "golang.org/x/sync" {
				t.Errorf("%s needs %s", pkg, m)
			}
		}
	}
}

func TestTheTestingPackageReachesNoProgram(t *testing.T) {
	for _, pkg := range budgets {
		if slices.Contains(goList(t, "{{.ImportPath}}", pkg), "testing") {
			t.Errorf("%s imports testing", pkg)
		}
	}
}

func TestLayersAreKept(t *testing.T) {
	backends := []string{"/kvm", "/kvm2", "/proxmox"}
	for _, pkg := range append([]string{"/provider", "/cloudinit"}, backends...) {
		if _, err := os.Stat("../.." + pkg); err != nil {
			continue
		}
		deps := goList(t, "{{.ImportPath}}", "."+pkg)
		if slices.Contains(deps, module) {
			t.Errorf("%s imports the root", pkg)
		}
		for _, other := range backends {
			if other != pkg && slices.Contains(deps, module+other) {
				t.Errorf("%s imports %s", pkg, other)
			}
		}
	}
}
