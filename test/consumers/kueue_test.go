//go:build consumers

package main

import (
	"slices"
	"strconv"
	"strings"
	"testing"
)

// TestKueue counts the memory of jobs, and takes GPUs back that were borrowed.
func TestKueue(t *testing.T) {
	c := up(t, "kueue", "8xh100-80gb")
	c.load(t, "kueue", "/manager")
	c.helm(t, "charts/kueue", "kueue-system", "--values", "testdata/kueue/values.yaml", "--set", "controllerManager.manager.image.repository="+
		repositories+"kueue,controllerManager.manager.image.tag="+tag+",controllerManager.manager.image.pullPolicy=Never")
	t.Run("quota", c.quota)
	t.Run("preemption", c.preemption)
}

// quota admits jobs with whole GPUs, partitions and shares by the memory that they get,
// out of one quota, and lets one that it has no room for run when another has ended.
func (c *check) quota(t *testing.T) {
	c.apply(t, "queue.yaml")
	c.until(t, `^True$`, "get", "sharingpolicy", "quarters", "-o", `jsonpath={.status.conditions[?(@.type=="Applied")].status}`)
	c.until(t, `^True$`, "get", "clusterqueue", "team", "-o", `jsonpath={.status.conditions[?(@.type=="Active")].status}`)

	// 120 GiB are room for a whole GPU and, in the rest, for partitions and shares.
	c.job(t, "team", "whole", "whole", 1)
	c.job(t, "team", "partitions", "partition", 2)
	c.job(t, "team", "share", "share", 1)
	c.charged(t, "whole", "81559Mi")
	c.charged(t, "partitions", "19968Mi") // two of 9984Mi
	c.charged(t, "share", c.memoryOfShare(t))
	for _, name := range []string{"whole", "partitions", "share"} {
		c.until(t, `^(Running ?)+$`, "get", "pods", "-l", "job-name="+name, "-o", "jsonpath={.items[*].status.phase}")
	}

	// There are seven more GPUs, but no more quota.
	c.job(t, "team", "second", "whole", 1)
	c.until(t, `insufficient unused quota for gpu\.memory in flavor gpus`, "get", "workloads", "-o", "jsonpath={.items[*].status.conditions[*].message}")
	c.until(t, `^true$`, "get", "job", "second", "-o", "jsonpath={.spec.suspend}")
	c.until(t, `^$`, "get", "pods", "-l", "job-name=second", "-o", "name")
	c.kubectl(t, "delete", "job", "whole", "--wait=true")
	c.charged(t, "second", "81559Mi")
	c.until(t, `^Running$`, "get", "pods", "-l", "job-name=second", "-o", "jsonpath={.items[*].status.phase}")
}

// preemption lets a queue borrow the GPUs of another of its cohort, and gives one of them back
// when the other has a job of higher priority.
func (c *check) preemption(t *testing.T) {
	c.kubectl(t, "delete", "jobs", "--all", "--wait=true")
	c.claims(t, 0)
	c.apply(t, "cohort.yaml")
	for _, queue := range []string{"owner", "guest"} {
		c.until(t, `^True$`, "get", "clusterqueue", queue, "-o", `jsonpath={.status.conditions[?(@.type=="Active")].status}`)
	}
	c.job(t, "guest", "borrower", "last", 1, "kueue.x-k8s.io/priority-class: low")
	c.job(t, "guest", "second-borrower", "last", 1, "kueue.x-k8s.io/priority-class: low")
	var borrowed []string
	for _, name := range []string{"borrower", "second-borrower"} {
		for _, gpu := range c.run(t, "job-name="+name, 1) {
			borrowed = append(borrowed, gpu)
		}
	}

	c.job(t, "owner", "urgent", "last", 1, "kueue.x-k8s.io/priority-class: high")
	for _, gpu := range c.run(t, "job-name=urgent", 1) {
		if !slices.Contains(borrowed, gpu) {
			t.Errorf("the owner's job has %s, which isn't one of the borrowed GPUs %q", gpu, borrowed)
		}
	}
	c.until(t, "InCohortReclamation", "get", "workloads", "-o", `jsonpath={.items[*].status.conditions[?(@.type=="Preempted")].reason}`)
	c.until(t, "^(true false|false true)$", "get", "jobs", "borrower", "second-borrower", "-o", "jsonpath={.items[*].spec.suspend}")
	c.claims(t, 2)

	// The borrower comes back when the owner has no use for it.
	c.kubectl(t, "delete", "job", "urgent", "--wait=true")
	c.until(t, "^false false$", "get", "jobs", "borrower", "second-borrower", "-o", "jsonpath={.items[*].spec.suspend}")
	for _, name := range []string{"borrower", "second-borrower"} {
		c.run(t, "job-name="+name, 1)
	}
}

// job makes a job in a queue whose pods have a claim each of a template.
func (c *check) job(t *testing.T, queue, name, template string, count int, labels ...string) {
	t.Helper()
	c.apply(t, "job.yaml", "QUEUE", queue, "NAME", name, "TEMPLATE", template, "COUNT", strconv.Itoa(count), "# LABELS", strings.Join(labels, ""))
}

// memoryOfShare is the limit of memory that the published shares say they have.
func (c *check) memoryOfShare(t *testing.T) string {
	t.Helper()
	all := strings.Fields(c.kubectl(t, "get", "resourceslices", "-o", `jsonpath={.items[*].spec.devices[?(@.attributes.type.string=="mps")].capacity.memory.value}`))
	if len(all) != 8 {
		t.Fatalf("the memory of the shares of two GPUs is %v", all)
	}
	return all[0]
}

// charged waits until a job is admitted and charged for so much memory.
func (c *check) charged(t *testing.T, name, memory string) {
	t.Helper()
	path := `jsonpath={range .items[?(@.metadata.ownerReferences[0].name=="` + name + `")]}{.status.admission.podSetAssignments[0].resourceUsage.gpu\.memory}{end}`
	c.until(t, "^"+memory+"$", "get", "workloads", "-o", path)
}
