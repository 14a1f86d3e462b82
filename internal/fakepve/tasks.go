package fakepve

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// task is a worker of a node.
type task struct {
	upid, node, kind, id string
	token                string
	start                time.Time
	exit                 string // empty while it runs
	log                  []string
	cancelled            bool
}

// step is a part of a task: it waits, and then changes something with the lock held. An empty text goes on.
type step struct {
	wait time.Duration
	do   func(t *task) (exit string)
}

// startTaskLocked begins a task on node. Undo is called when it fails on purpose.
func (c *Cluster) startTaskLocked(q *request, node, kind, id string, undo func(), steps ...step) string {
	c.taskSerial++
	now := time.Now()
	t := &task{
		upid: fmt.Sprintf("UPID:%s:%08X:%08X:%08X:%s:%s:%s:", node, 1000+c.taskSerial, c.taskSerial*17, now.Unix(), kind, id, q.token.id),
		node: node, kind: kind, id: id, token: q.token.id, start: now,
	}
	c.tasks[t.upid] = t
	f := c.taskFaultLocked(kind)
	if c.closed {
		t.exit = "unexpected status"
		return t.upid
	}
	c.running.Go(func() { c.runTask(t, f, undo, steps) })
	return t.upid
}

func (c *Cluster) runTask(t *task, f TaskFault, undo func(), steps []step) {
	warns := strings.HasPrefix(f.Exit, "WARNINGS")
	exit := "OK"
	for i, s := range steps {
		wait := s.wait
		if i == 0 {
			wait += f.Delay
		}
		if !c.sleep(wait) {
			exit = "unexpected status"
			break
		}
		c.mu.Lock()
		last := i == len(steps)-1
		switch {
		case t.cancelled:
			exit = "unexpected status"
		case f.Kill && last:
			exit = "unexpected status"
		case f.Exit != "" && !warns && last:
			exit = f.Exit
			if undo != nil {
				undo()
			}
		default:
			if text := s.do(t); text != "" {
				exit = text
			}
		}
		c.mu.Unlock()
		if exit != "OK" {
			break
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if exit == "OK" && warns {
		exit = f.Exit
		t.log = append(t.log, "WARN: something is left over")
	}
	t.log = append(t.log, "TASK "+exit)
	t.exit = exit
}

// taskLocked finds a task of the node in the path. The real server reads the node out of the UPID and looks there.
func (q *request) taskLocked() (*task, *failure) {
	t := q.c.tasks[q.vars["upid"]]
	if t == nil || t.node != q.vars["node"] {
		return nil, badParam("upid", "no such task")
	}
	if t.token != q.token.id {
		if f := q.needLocked("/nodes/"+t.node, "Sys.Audit"); f != nil {
			return nil, f
		}
	}
	return t, nil
}

// getTasks lists the token's tasks. The real server's list of active ones also has some that have just ended.
func getTasks(q *request) (any, *failure) {
	rows := []map[string]any{}
	for _, upid := range slices.Sorted(maps.Keys(q.c.tasks)) {
		t := q.c.tasks[upid]
		if t.node != q.vars["node"] || q.params["typefilter"] != "" && q.params["typefilter"] != t.kind || q.params["vmid"] != "" && q.params["vmid"] != t.id {
			continue
		}
		if t.token != q.token.id && !q.c.mayLocked(q.token, "/nodes/"+t.node, "Sys.Audit") {
			continue
		}
		row := map[string]any{"upid": t.upid, "node": t.node, "type": t.kind, "id": t.id, "user": t.token, "pid": 1000, "pstart": 17, "starttime": t.start.Unix()}
		if t.exit != "" {
			row["endtime"], row["status"] = time.Now().Unix(), t.exit
		}
		rows = append(rows, row)
	}
	return rows, nil
}

func getTaskStatus(q *request) (any, *failure) {
	t, f := q.taskLocked()
	if f != nil {
		return nil, f
	}
	user, tokenID, _ := strings.Cut(t.token, "!")
	answer := map[string]any{"upid": t.upid, "node": t.node, "type": t.kind, "id": t.id, "user": user, "tokenid": tokenID,
		"pid": 1000, "pstart": 17, "starttime": t.start.Unix(), "status": "running"}
	if t.exit != "" {
		answer["status"], answer["exitstatus"] = "stopped", t.exit
	}
	return answer, nil
}

func getTaskLog(q *request) (any, *failure) {
	t, f := q.taskLocked()
	if f != nil {
		return nil, f
	}
	lines := []map[string]any{}
	for i, l := range t.log {
		lines = append(lines, map[string]any{"n": i + 1, "t": l})
	}
	return lines, nil
}

func stopTask(q *request) (any, *failure) {
	t, f := q.taskLocked()
	if f != nil {
		return nil, f
	}
	t.cancelled = true
	return nil, nil
}
