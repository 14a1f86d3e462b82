package fakepve_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"net/textproto"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"crawl.example.com/egress/internal/fakepve"
)

const tokenID, secret = "egress@pve!test", "a-secret"

// bench is a cluster with a template 9000 on pve1 and a token that may do everything.
type bench struct {
	*testing.T
	*fakepve.Cluster
	client *http.Client
	secret string
}

// run runs f in a bubble.
func run(t *testing.T, config fakepve.Config, f func(b *bench)) {
	synctest.Test(t, func(t *testing.T) {
		c := fakepve.New(config)
		c.AddToken(tokenID, secret)
		c.Grant(tokenID, "/", "VM.Clone", "VM.Allocate", "VM.Audit", "VM.PowerMgmt", "VM.Config.Options", "VM.Config.CDROM", "VM.Config.CPU",
			"VM.Config.Memory", "VM.Config.Disk", "VM.Config.Network", "VM.Config.Cloudinit", "VM.GuestAgent.Audit", "VM.Monitor", "Datastore.AllocateTemplate",
			"Datastore.Allocate", "Datastore.AllocateSpace", "Datastore.Audit", "SDN.Use", "Sys.Audit", "Pool.Audit")
		c.AddTemplate("pve1", 9000, "debian", fakepve.Template{})
		roots := x509.NewCertPool()
		roots.AppendCertsFromPEM(c.CA())
		transport := &http.Transport{DialContext: c.Dial, TLSClientConfig: &tls.Config{RootCAs: roots}, IdleConnTimeout: 3 * time.Second}
		defer c.Close()
		defer transport.CloseIdleConnections()
		f(&bench{t, c, &http.Client{Transport: transport}, secret})
	})
}

// answer is what came back.
type answer struct {
	status int
	reason string
	body   string
	data   any
	errors map[string]string
}

func (b *bench) do(node, method, path string, body map[string]any) (answer, error) {
	b.Helper()
	var payload io.Reader
	if body != nil {
		encoded, err := json.Marshal(body)
		if err != nil {
			b.Fatal(err)
		}
		payload = bytes.NewReader(encoded)
	}
	req, err := http.NewRequestWithContext(b.Context(), method, b.URL(node)+"/api2/json"+path, payload)
	if err != nil {
		b.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	return b.send(req)
}

func (b *bench) send(req *http.Request) (answer, error) {
	b.Helper()
	req.Header.Set("Authorization", "PVEAPIToken="+tokenID+"="+b.secret)
	res, err := b.client.Do(req)
	if err != nil {
		return answer{}, err
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	if err != nil {
		return answer{}, err
	}
	_, reason, _ := strings.Cut(res.Status, " ")
	a := answer{status: res.StatusCode, reason: reason, body: string(text)}
	var decoded struct {
		Data   any
		Errors map[string]string
	}
	if json.Unmarshal(text, &decoded) == nil {
		a.data, a.errors = decoded.Data, decoded.Errors
	}
	return a, nil
}

// ok does a request that must succeed.
func (b *bench) ok(node, method, path string, body map[string]any) any {
	b.Helper()
	a, err := b.do(node, method, path, body)
	if err != nil || a.status != 200 {
		b.Fatalf("%s %s: %+v, %v", method, path, a, err)
	}
	return a.data
}

// refused does a request that must be answered like that.
func (b *bench) refused(node, method, path string, body map[string]any, status int, reason string) answer {
	b.Helper()
	a, err := b.do(node, method, path, body)
	if err != nil || a.status != status || !strings.Contains(a.reason, reason) {
		b.Errorf("%s %s: %+v, %v, want %d %s", method, path, a, err, status, reason)
	}
	return a
}

// task waits for the end of a task and returns how it ended.
func (b *bench) task(upid any) string {
	b.Helper()
	id, _ := upid.(string)
	parts := strings.Split(id, ":")
	if len(parts) != 9 {
		b.Fatalf("%v is no UPID", upid)
	}
	for {
		status, _ := b.ok(parts[1], "GET", "/nodes/"+parts[1]+"/tasks/"+id+"/status", nil).(map[string]any)
		if status["status"] == "stopped" {
			return fmt.Sprint(status["exitstatus"])
		}
		time.Sleep(100 * time.Millisecond)
	}
}

func (b *bench) clone(newid int, more map[string]any) {
	b.Helper()
	body := map[string]any{"newid": newid, "name": fmt.Sprintf("vm-%d", newid), "description": "mark"}
	for k, v := range more {
		body[k] = v
	}
	if exit := b.task(b.ok("pve1", "POST", "/nodes/pve1/qemu/9000/clone", body)); exit != "OK" {
		b.Fatal(exit)
	}
}

func TestACloneIsStagedAndKeepsWhatTheTemplateHas(t *testing.T) {
	run(t, fakepve.Config{CloneTime: 3 * time.Second}, func(b *bench) {
		upid := b.ok("pve2", "POST", "/nodes/pve1/qemu/9000/clone", map[string]any{"newid": 500, "name": "a", "description": "mark"})
		config := func() map[string]any {
			m, _ := b.ok("pve1", "GET", "/nodes/pve1/qemu/500/config", nil).(map[string]any)
			return m
		}
		if c := config(); c["lock"] != "clone" || c["name"] != nil || c["description"] != nil {
			b.Errorf("at first: %v", c)
		}
		time.Sleep(1100 * time.Millisecond)
		if c := config(); c["lock"] != "clone" || c["name"] != "a" || c["description"] != "mark" {
			b.Errorf("after a third: %v", c)
		}
		if exit := b.task(upid); exit != "OK" {
			b.Error(exit)
		}
		template, _ := b.VM(9000)
		c := config()
		if c["lock"] != nil || c["template"] != nil || c["tags"] != "template" || c["net0"] == template.Config["net0"] || c["scsi0"] == nil || c["ide0"] == nil {
			b.Errorf("in the end: %v", c)
		}
		b.refused("pve1", "POST", "/nodes/pve1/qemu/9000/clone", map[string]any{"newid": 500}, 500, "unable to create VM 500: config file already exists")
		if a := b.refused("pve1", "GET", "/cluster/nextid?vmid=500", nil, 400, "Parameter verification failed."); a.errors["vmid"] != "VM 500 already exists" {
			b.Error(a)
		}
	})
}

func TestRequestsAreCheckedAgainstTheSchema(t *testing.T) {
	run(t, fakepve.Config{}, func(b *bench) {
		a := b.refused("pve1", "POST", "/nodes/pve1/qemu/9000/clone", map[string]any{"name": "a_b", "tags": "x", "full": "yes"}, 400, "Parameter verification failed.")
		for field, want := range map[string]string{"newid": "not optional", "name": "format", "tags": "not defined in schema", "full": "type check ('boolean') failed - got 'yes'"} {
			if !strings.Contains(a.errors[field], want) {
				b.Errorf("%s: %q, want %q", field, a.errors[field], want)
			}
		}
		b.refused("pve1", "GET", "/nodes/pve1/qemu/9000/nothing", nil, 501, "Method 'GET /nodes/pve1/qemu/9000/nothing' not implemented")
		b.refused("pve1", "DELETE", "/nodes/pve1/qemu/9000", map[string]any{"purge": 1}, 501, "Unexpected content for method 'DELETE'")
		// The answer comes before the body is read, so a client may be told by the closed connection instead.
		if a, err := b.do("pve1", "POST", "/nodes/pve1/qemu/9000/config", map[string]any{"description": strings.Repeat("x", 600<<10)}); err == nil && a.status != 501 {
			b.Errorf("a large body: %+v", a)
		}
		b.refused("pve1", "POST", "/nodes/nowhere/qemu/9000/clone", map[string]any{"newid": 500}, 500, "hostname lookup 'nowhere' failed")
		b.refused("pve2", "GET", "/nodes/pve2/qemu/9000/config", nil, 500, "Configuration file 'nodes/pve2/qemu-server/9000.conf' does not exist")
	})
}

func TestRefusedCredentialsAreHeldBackAndHaveNoBody(t *testing.T) {
	run(t, fakepve.Config{}, func(b *bench) {
		b.secret = "wrong"
		begin := time.Now()
		if a := b.refused("pve1", "GET", "/version", nil, 401, "Authentication failed!"); a.body != "" {
			b.Errorf("body %q", a.body)
		}
		if took := time.Since(begin); took != 3*time.Second {
			b.Errorf("took %s", took)
		}
	})
}

func TestListsHideWhatMayNotBeSeen(t *testing.T) {
	run(t, fakepve.Config{}, func(b *bench) {
		b.clone(500, map[string]any{"pool": "egress"})
		b.Grant(tokenID, "/vms")
		count := func() int {
			all, _ := b.ok("pve1", "GET", "/cluster/resources?type=vm", nil).([]any)
			return len(all)
		}
		if n := count(); n != 1 { // the pool still shows its member
			b.Errorf("%d are seen", n)
		}
		b.Grant(tokenID, "/pool")
		if n := count(); n != 0 {
			b.Errorf("%d are seen", n)
		}
		b.refused("pve1", "GET", "/nodes/pve1/qemu/500/config", nil, 403, "Permission check failed (/vms/500, VM.Audit)")
	})
}

func TestVersionsDifferInWhatTheAgentNeeds(t *testing.T) {
	for version, privilege := range map[int]string{8: "VM.Monitor", 9: "VM.GuestAgent.Audit"} {
		t.Run(fmt.Sprint(version), func(t *testing.T) {
			run(t, fakepve.Config{Version: version}, func(b *bench) {
				b.clone(500, nil)
				b.Edit(500, "ide0", "")
				const path = "/nodes/pve1/qemu/500/agent/network-get-interfaces"
				b.refused("pve1", "GET", path, nil, 500, "VM 500 is not running")
				if exit := b.task(b.ok("pve1", "POST", "/nodes/pve1/qemu/500/status/start", nil)); exit != "OK" {
					b.Fatal(exit)
				}
				b.refused("pve1", "GET", path, nil, 500, "QEMU guest agent is not running")
				time.Sleep(5 * time.Second)
				if text := fmt.Sprint(b.ok("pve1", "GET", path, nil)); !strings.Contains(text, "10.0.1.244") {
					b.Error(text)
				}
				b.Grant(tokenID, "/vms", "VM.Audit")
				b.refused("pve1", "GET", path, nil, 403, privilege)
			})
		})
	}
}

// part is one part of an upload.
type part struct{ name, file, value string }

func (b *bench) upload(node, target string, parts ...part) (answer, error) {
	b.Helper()
	var body bytes.Buffer
	w := multipart.NewWriter(&body)
	for _, p := range parts {
		header := textproto.MIMEHeader{}
		header.Set("Content-Disposition", fmt.Sprintf(`form-data; name="%s"`, p.name))
		if p.file != "" {
			header.Set("Content-Disposition", fmt.Sprintf(`form-data; name="%s"; filename="%s"`, p.name, p.file))
		}
		out, err := w.CreatePart(header)
		if err != nil {
			b.Fatal(err)
		}
		io.WriteString(out, p.value)
	}
	w.Close()
	req, err := http.NewRequestWithContext(b.Context(), http.MethodPost, b.URL(node)+"/api2/json/nodes/"+target+"/storage/local/upload", &body)
	if err != nil {
		b.Fatal(err)
	}
	req.Header.Set("Content-Type", w.FormDataContentType())
	return b.send(req)
}

func TestUploadsAreTakenInOneOrderOnly(t *testing.T) {
	run(t, fakepve.Config{}, func(b *bench) {
		content, file := part{"content", "", "iso"}, part{"filename", "a b.iso", "data"}
		sum := part{"checksum", "", "3a6eb0790f39ac87c94f3856b2dd2c5d110e6811602261a9a923d3bb23adc8b7"}
		algorithm := part{"checksum-algorithm", "", "sha256"}
		for _, wrong := range [][]part{{file, content}, {algorithm, content, file}, {content, {"filename", "", "x.iso"}, file}} {
			if a, err := b.upload("pve1", "pve1", wrong...); err != nil || a.status != 400 {
				b.Errorf("%v: %+v, %v", wrong, a, err)
			}
		}
		a, err := b.upload("pve2", "pve1", content, algorithm, sum, file)
		if err != nil || a.status != 200 || !strings.HasPrefix(fmt.Sprint(a.data), "UPID:pve2:") {
			b.Fatalf("%+v, %v: the task belongs to the node that was connected to", a, err)
		}
		b.refused("pve1", "GET", fmt.Sprintf("/nodes/pve1/tasks/%v/status", a.data), nil, 400, "Parameter verification failed.")
		if exit := b.task(a.data); exit != "OK" {
			b.Error(exit)
		}
		if got := b.Volume("pve1:local:iso/a_b.iso"); string(got) != "data" {
			b.Errorf("%q in %v", got, b.Volumes())
		}
		sum.value = strings.Repeat("0", 64)
		if a, err = b.upload("pve1", "pve1", content, algorithm, sum, file); err != nil || !strings.Contains(b.task(a.data), "checksum mismatch") {
			b.Errorf("%+v, %v", a, err)
		}
		b.refused("pve1", "GET", "/nodes/pve1/storage/local/content/local:iso/none.iso", nil, 500, "volume_size_info on 'local:iso/none.iso' failed")
	})
}

func TestASlowUploadLosesItsFileAndItsAnswer(t *testing.T) {
	run(t, fakepve.Config{}, func(b *bench) {
		b.SlowUploads(6 * time.Second)
		begin := time.Now()
		a, err := b.upload("pve1", "pve1", part{"content", "", "iso"}, part{"filename", "a.iso", "data"})
		if err == nil || time.Since(begin) != 5*time.Second {
			b.Errorf("%+v, %v after %s", a, err, time.Since(begin))
		}
		b.Wait()
		if got := b.Volume("pve1:local:iso/a.iso"); got != nil {
			b.Errorf("the file is there: %q", got)
		}
	})
}

func TestDestroyingNeedsAStoppedUnprotectedUnlockedVM(t *testing.T) {
	run(t, fakepve.Config{}, func(b *bench) {
		b.clone(500, nil)
		const path = "/nodes/pve1/qemu/500"
		if exit := b.task(b.ok("pve1", "POST", path+"/status/start", nil)); exit != "OK" {
			b.Fatal(exit)
		}
		b.refused("pve1", "DELETE", path, nil, 500, "VM 500 is running - destroy failed")
		b.task(b.ok("pve1", "POST", path+"/status/stop", nil))
		b.Edit(500, "protection", "1")
		b.refused("pve1", "DELETE", path, nil, 500, "can't remove VM 500 - protection mode enabled")
		b.Edit(500, "protection", "")
		b.Edit(500, "lock", "backup")
		b.refused("pve1", "DELETE", path, nil, 500, "VM is locked (backup)")
		b.Edit(500, "lock", "")
		b.SetHA(500, true)
		b.refused("pve1", "DELETE", path, nil, 500, "used in HA resources and purge parameter not set")
		b.Hibernate(500)
		if exit := b.task(b.ok("pve1", "DELETE", path+"?purge=1", nil)); exit != "OK" {
			b.Error(exit)
		}
		if _, ok := b.VM(500); ok || len(b.Volumes()) != 2 {
			b.Errorf("left over: %v", b.Volumes())
		}
	})
}

func TestAManagedVMStopsAfterItsTaskHasEnded(t *testing.T) {
	run(t, fakepve.Config{}, func(b *bench) {
		b.clone(500, nil)
		b.task(b.ok("pve1", "POST", "/nodes/pve1/qemu/500/status/start", nil))
		b.SetHA(500, true)
		upid := b.ok("pve1", "POST", "/nodes/pve1/qemu/500/status/stop", nil)
		if exit := b.task(upid); exit != "OK" || !strings.Contains(fmt.Sprint(upid), ":hastop:") {
			b.Errorf("%v: %s", upid, exit)
		}
		if v, _ := b.VM(500); !v.Running {
			b.Error("it has stopped already")
		}
		b.Wait()
		if v, _ := b.VM(500); v.Running {
			b.Error("it never stops")
		}
	})
}

func TestStartingAHibernatedVMResumesIt(t *testing.T) {
	run(t, fakepve.Config{}, func(b *bench) {
		b.clone(500, nil)
		b.Hibernate(500)
		b.refused("pve1", "PUT", "/nodes/pve1/qemu/500/config", map[string]any{"cores": 2}, 500, "VM is locked (suspended)")
		if exit := b.task(b.ok("pve1", "POST", "/nodes/pve1/qemu/500/status/start", nil)); exit != "OK" {
			b.Error(exit)
		}
		if v, _ := b.VM(500); v.Config["lock"] != "" || v.Config["vmstate"] != "" || !v.Running {
			b.Errorf("%+v", v)
		}
	})
}

func TestTheConfigurationIsComparedAndSet(t *testing.T) {
	run(t, fakepve.Config{}, func(b *bench) {
		b.clone(500, nil)
		config, _ := b.ok("pve1", "GET", "/nodes/pve1/qemu/500/config", nil).(map[string]any)
		b.ok("pve1", "PUT", "/nodes/pve1/qemu/500/config", map[string]any{"digest": config["digest"], "tags": "B;a;b", "delete": "ide0"})
		v, _ := b.VM(500)
		if v.Config["tags"] != "a;b" || v.Config["ide0"] != "" || strings.Contains(strings.Join(b.Volumes(), " "), "vm-500-cloudinit") {
			b.Errorf("%v, %v", v, b.Volumes())
		}
		b.refused("pve1", "PUT", "/nodes/pve1/qemu/500/config", map[string]any{"digest": config["digest"], "cores": 2}, 500, "checksum mismatch")
		b.refused("pve1", "PUT", "/nodes/pve1/qemu/500/config", map[string]any{"ide2": "local:iso/x.iso"}, 500, "explicit 'media=cdrom' is required")
		b.ok("pve1", "PUT", "/nodes/pve1/qemu/500/config", map[string]any{"ide2": "local:iso/x.iso,media=cdrom"})
		if exit := b.task(b.ok("pve1", "POST", "/nodes/pve1/qemu/500/status/start", nil)); exit != "volume 'local:iso/x.iso' does not exist" {
			b.Error(exit)
		}
	})
}

func TestANodeThatIsDownIsSpokenOfByItsPeers(t *testing.T) {
	run(t, fakepve.Config{}, func(b *bench) {
		b.SetNode("pve1", fakepve.NodeRefuses)
		b.refused("pve2", "GET", "/nodes/pve1/qemu", nil, 595, "Connection refused")
		if _, err := b.do("pve1", "GET", "/version", nil); err == nil {
			b.Error("it answers")
		}
		b.SetNode("pve1", fakepve.NodeSilent)
		begin := time.Now()
		b.refused("pve2", "GET", "/nodes/pve1/qemu", nil, 596, "Connection timed out")
		if took := time.Since(begin); took != 30*time.Second {
			b.Errorf("took %s", took)
		}
	})
}

func TestFaultsHitAnswersOrWork(t *testing.T) {
	run(t, fakepve.Config{}, func(b *bench) {
		b.Fault(fakepve.Fault{Path: "/nodes/*/qemu/*/clone", Times: 1, Carry: true, Status: 596, Reason: "Connection timed out"})
		b.refused("pve1", "POST", "/nodes/pve1/qemu/9000/clone", map[string]any{"newid": 500, "name": "a"}, 596, "Connection timed out")
		b.Wait()
		if v, ok := b.VM(500); !ok || v.Config["name"] != "a" {
			b.Error("the work has not gone on")
		}
		b.TaskFault(fakepve.TaskFault{Type: "qmclone", Times: 1, Exit: "clone failed: disk is full"})
		if exit := b.task(b.ok("pve1", "POST", "/nodes/pve1/qemu/9000/clone", map[string]any{"newid": 501})); exit != "clone failed: disk is full" {
			b.Error(exit)
		}
		if _, ok := b.VM(501); ok {
			b.Error("a failed clone is still there")
		}
		b.TaskFault(fakepve.TaskFault{Type: "qmclone", Times: 1, Kill: true})
		if exit := b.task(b.ok("pve1", "POST", "/nodes/pve1/qemu/9000/clone", map[string]any{"newid": 502})); exit != "unexpected status" {
			b.Error(exit)
		}
		if v, _ := b.VM(502); v.Config["lock"] != "clone" {
			b.Errorf("%+v", v)
		}
		remove := b.Fault(fakepve.Fault{Path: "/version", Drop: true})
		if _, err := b.do("pve1", "GET", "/version", nil); err == nil {
			b.Error("it answers")
		}
		remove()
		b.ok("pve1", "GET", "/version", nil)
	})
}

func TestTheClusterViewIsStaleAboutNamesAndNotAboutNodes(t *testing.T) {
	run(t, fakepve.Config{Stale: 10 * time.Second}, func(b *bench) {
		b.AddVM("pve2", 600, "old", "", nil)
		b.Edit(600, "name", "new")
		b.Migrate(600, "pve3")
		row := func() string {
			all, _ := b.ok("pve1", "GET", "/cluster/resources?type=vm", nil).([]any)
			m, _ := all[0].(map[string]any)
			return fmt.Sprint(m["vmid"], m["name"], m["node"])
		}
		if got := row(); got != "600newpve3" && got != "600oldpve3" {
			b.Error(got)
		}
		time.Sleep(11 * time.Second)
		if got := row(); got != "600newpve3" {
			b.Error(got)
		}
	})
}

func TestAnIdleConnectionIsClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fakepve.New(fakepve.Config{})
		defer c.Close()
		raw, err := c.Dial(context.Background(), "tcp", "pve1.pve.test:8006")
		if err != nil {
			t.Fatal(err)
		}
		conn := tls.Client(raw, &tls.Config{InsecureSkipVerify: true})
		if err := conn.Handshake(); err != nil {
			t.Fatal(err)
		}
		begin := time.Now()
		if _, err := conn.Read(make([]byte, 1)); err == nil || time.Since(begin) != 5*time.Second {
			t.Errorf("%v after %s", err, time.Since(begin))
		}
	})
}
