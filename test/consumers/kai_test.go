//go:build consumers

package main

import (
	"strings"
	"testing"
)

// TestKAI schedules one gang of five pods on a node of eight GPUs, lets a second one wait as a
// whole, and lets it run when the first is gone.
func TestKAI(t *testing.T) {
	c := up(t, "kai", "8xh100-80gb")
	for _, program := range strings.Fields("kai-operator kai-scheduler podgrouper kai-binder kai-podgroupcontroller kai-queuecontroller kai-admission") {
		c.load(t, program, "/workspace/app")
	}
	c.apply(t, "policy.yaml")
	c.apply(t, "role.yaml")
	c.until(t, "^True$", "get", "sharingpolicy", "whole", "-o", `jsonpath={.status.conditions[?(@.type=="Applied")].status}`)
	c.installKAI(t)
	t.Run("run", func(t *testing.T) {
		c.gang(t, "first")
		c.run(t, "gang=first", 5)
	})
	t.Run("gang", func(t *testing.T) {
		c.gang(t, "second")
		c.until(t, "(?i)unschedulable", "get", "pods", "-l", "gang=second", "-o", "jsonpath={.items[*].status.conditions[*].reason}")
		c.claims(t, 10)
		c.allocated(t, 5)
		if nodes := c.kubectl(t, "get", "pods", "-l", "gang=second", "-o", "jsonpath={.items[*].spec.nodeName}"); nodes != "" {
			t.Errorf("pods of a gang that waits have nodes: %s", nodes)
		}
		c.kubectl(t, "delete", "pods", "-l", "gang=first", "--wait=true")
		c.run(t, "gang=second", 5)
	})
	t.Run("delete", func(t *testing.T) {
		c.kubectl(t, "delete", "pods", "-l", "gang", "--wait=true")
		c.free(t)
	})
}

// installKAI installs its chart without the hooks, which run an image with kubectl. One of them
// is no program but the configuration, from which the operator makes the deployments.
func (c *check) installKAI(t *testing.T) {
	t.Helper()
	const chart, namespace = "deployments/kai-scheduler", "kai-scheduler"
	values := []string{"--values", "testdata/kai/values.yaml"}
	c.helm(t, chart, namespace, append(values, "--no-hooks")...)
	render := append([]string{"template", c.system.name, c.module(t, chart), "--namespace", namespace, "--show-only", "templates/kai-config.yaml"}, values...)
	config, err := c.Command(t.Context(), "helm", render...).Output()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Apply(t.Context(), namespace, config); err != nil {
		t.Fatal(err)
	}
	c.until(t, "pod-grouper", "get", "deployments", "-n", namespace, "-o", "name")
	c.until(t, "kai-scheduler-default", "get", "deployments", "-n", namespace, "-o", "name")
	c.must(t, namespace, c.Command(t.Context(), "kubectl", "wait", "-n", namespace, "--for=condition=Available", "deployment", "--all", "--timeout=3m"))
}

// gang makes a pod group and its pods.
func (c *check) gang(t *testing.T, name string) {
	t.Helper()
	c.apply(t, "group.yaml", "NAME", name)
	for pod := range strings.SplitSeq("a b c d e", " ") {
		c.apply(t, "pod.yaml", "NAME", name, "POD", pod)
	}
}
