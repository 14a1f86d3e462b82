package main

import (
	"bytes"
	"context"
	"embed"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

//go:embed peers/*
var peerFiles embed.FS

// errSkipped is why a row is left out.
type errSkipped string

func (e errSkipped) Error() string { return "skipped: " + string(e) }

// cacheDir returns the folder .cache/bench-peers beside go.work, where the peers from npm live, between runs too.
func cacheDir() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for at := dir; ; at = filepath.Dir(at) {
		if _, err := os.Stat(filepath.Join(at, "go.work")); err == nil {
			dir = at
			break
		}
		if at == filepath.Dir(at) {
			break
		}
	}
	return filepath.Join(dir, ".cache", "bench-peers"), nil
}

// installPeers has npm install the versions that peers/package.json pins, unless they are there, and returns where.
func installPeers(ctx context.Context) (string, error) {
	for _, program := range []string{"npm", "node"} {
		if _, err := exec.LookPath(program); err != nil {
			return "", errSkipped("no " + program)
		}
	}
	dir, err := cacheDir()
	if err != nil {
		return "", err
	}
	// The scripts go where the packages are, because a module looks for those from where it lies.
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	was, _ := os.ReadFile(filepath.Join(dir, "package.json"))
	entries, err := peerFiles.ReadDir("peers")
	if err != nil {
		return "", err
	}
	for _, e := range entries {
		content, err := peerFiles.ReadFile("peers/" + e.Name())
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, e.Name()), content, 0o644)
		}
		if err != nil {
			return "", err
		}
	}
	wanted, _ := peerFiles.ReadFile("peers/package.json")
	const done = ".installed"
	if _, err := os.Stat(filepath.Join(dir, done)); err == nil && bytes.Equal(was, wanted) {
		return dir, nil
	}
	os.Remove(filepath.Join(dir, done))
	fmt.Fprintln(os.Stderr, "installing the peers from npm into", dir)
	ctx, cancel := context.WithTimeout(ctx, 90*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, "npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts")
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", errSkipped(fmt.Sprintf("npm install: %v: %s", err, lastLine(out)))
	}
	return dir, os.WriteFile(filepath.Join(dir, done), nil, 0o644)
}

func lastLine(out []byte) string {
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	return lines[len(lines)-1]
}

// startChain starts proxy-chain in front of the proxies and returns its address.
func startChain(ctx context.Context, dir string, proxies []string) (*child, string, error) {
	c, port, err := start(ctx, nil, dir, "node", append([]string{"proxy-chain.mjs"}, proxies...)...)
	return c, "127.0.0.1:" + port, err
}

// startCrawlee starts the script that takes turns with Crawlee.
func startCrawlee(ctx context.Context, dir string) (*child, error) {
	c, _, err := start(ctx, []string{"CRAWLEE_LOG_LEVEL=OFF"}, dir, "node", "crawlee.mjs")
	return c, err
}

// squidConfig makes squid do no more than it must: no cache, no logs, connections kept to both sides.
const squidConfig = `http_port %s
pid_filename none
access_log none
cache_log %s
cache_store_log none
cache deny all
cache_mem 0
memory_pools on
netdb_filename none
pinger_enable off
icp_port 0
htcp_port 0
shutdown_lifetime 0 seconds
client_persistent_connections on
server_persistent_connections on
via off
forwarded_for delete
http_access allow all
never_direct allow all
`

// startSquid starts squid with the proxies as its parents, taken in turn, and returns its address. It runs in the
// foreground and is ended by stop.
func startSquid(ctx context.Context, proxies []string) (address string, stop func(), err error) {
	program, err := exec.LookPath("squid")
	if err != nil {
		if program, err = exec.LookPath("/usr/sbin/squid"); err != nil {
			return "", nil, errSkipped("no squid")
		}
	}
	// As root squid becomes another user, who has to write here too.
	dir, err := os.MkdirTemp("", "bench-squid-")
	if err != nil {
		return "", nil, err
	}
	if err := os.Chmod(dir, 0o777); err != nil {
		return "", nil, err
	}
	address = freePort()
	config := fmt.Sprintf(squidConfig, address, filepath.Join(dir, "cache.log"))
	config += "coredump_dir " + dir + "\n"
	for i, proxy := range proxies {
		host, port, _ := net.SplitHostPort(proxy)
		config += fmt.Sprintf("cache_peer %s parent %s 0 no-query no-digest no-netdb-exchange round-robin name=p%d\n", host, port, i)
	}
	file := filepath.Join(dir, "squid.conf")
	if err := os.WriteFile(file, []byte(config), 0o644); err != nil {
		return "", nil, err
	}
	cmd := exec.CommandContext(ctx, program, "-N", "-f", file)
	var said bytes.Buffer
	cmd.Dir, cmd.Stderr, cmd.Stdout = dir, &said, &said
	if err := cmd.Start(); err != nil {
		return "", nil, err
	}
	ended := make(chan struct{})
	go func() { cmd.Wait(); close(ended) }()
	stop = func() {
		cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-ended:
		case <-time.After(5 * time.Second):
			cmd.Process.Kill()
			<-ended
		}
		os.RemoveAll(dir)
	}
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); {
		if conn, err := net.Dial("tcp", address); err == nil {
			conn.Close()
			return address, stop, nil
		}
		select {
		case <-ended:
			stop()
			return "", nil, fmt.Errorf("squid ended: %s", lastLine(said.Bytes()))
		case <-time.After(20 * time.Millisecond):
		}
	}
	stop()
	return "", nil, errors.New("squid did not listen within 10 s")
}
