package main

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// group is the tests of a table: each of their subtests is an operation, and the
// subtests of that are a step and a fault.
type group struct {
	title string
	dir   string
	tests []string
	// fault returns the fault from the name of a case.
	fault func(name string) string
	// holds is the result of each case.
	holds string
}

func groups() []group {
	return []group{
		{
			"Prepare and unprepare, in process", "pkg/node/prepare", []string{"TestCrash"}, last,
			"The operation is stopped after each of its steps, the fault happens, and the plugin's parts start again. The doctor " +
				"finds nothing, a claim whose prepare was answered stays prepared, the operation can be repeated and undone, and nothing is left.",
		},
		{
			"Changing partitions and MIG mode, in process", "pkg/node/partition", []string{"TestCrash"}, afterNumber,
			"Stopped after each step, also within the driver's calls. Instances of others are untouched, claims have theirs, and " +
				"in the end the GPU is as it was.",
		},
		{
			"MPS daemons, compute modes and time slices, in process", "pkg/node/sharing", []string{"TestCrash"}, afterNumber,
			"Stopped after each step. Daemons and settings are those that the remaining claims need, and in the end as they were found.",
		},
		{
			"The plugin's program", "test/crash", []string{"TestWhole", "TestPartitions", "TestShares", "TestReplicas", "TestReset"}, killed,
			"The program is killed with SIGKILL after each step and started again, with a real API server and MPS supervisor. The " +
				"doctor finds nothing, the kubelet's repeated call succeeds, the neighbour's claim is untouched, and nothing is left.",
		},
		{
			"The MPS supervisor's program", "test/crash", []string{"TestSupervisorSteps"}, killed,
			"The supervisor is killed after each step of the plugin's operation and started again. The same holds, and a daemon " +
				"with clients runs on.",
		},
		{
			"The MPS supervisor, in process", "pkg/mps/supervisor", []string{"TestKilledAtEveryStep"}, killed,
			"The next supervisor adopts the daemon or removes what is left of it, and starts and stops daemons as asked.",
		},
		{
			"The node's disk", "pkg/node", []string{"TestPowerLoss"}, func(string) string { return "power cut" },
			"The power is cut after each call that changes or syncs a file; a case is a state of the disk after that. What the " +
				"kubelet was answered is true when the node is up again, and no record is unreadable.",
		},
		{
			"The node's disk fails", "pkg/node", []string{"TestDiskFaults"}, func(name string) string { return name },
			"Each call of an operation fails in turn: it alone, with or without having its effect; it and all that need space; it " +
				"and all that change something; a write of which half is on disk when the node goes down. The kubelet repeats its " +
				"call on the disk that works again, or the plugin starts again before: a claim whose prepare was answered is " +
				"prepared, its devices aren't prepared for another, and no file is left.",
		},
	}
}

// last is the fault in "step/fault".
func last(name string) string {
	_, fault, _ := cutLast(name)
	return fault
}

// afterNumber is the fault in "03 fault".
func afterNumber(name string) string {
	_, fault, _ := strings.Cut(name, " ")
	return fault
}

// killed is the fault in "step" and in "step, more".
func killed(name string) string {
	if _, more, ok := strings.Cut(name, ", "); ok {
		return "killed, " + more
	}
	return "killed"
}

// table is the group's table, and the number of its cases. There is none unless each test
// has ended and has cases, and nothing of it failed.
func (g group) table(all []result) (text string, total int, err error) {
	counts, faults := map[string]map[string]int{}, map[string]bool{}
	tried, ended := map[string]bool{}, map[string]bool{}
	for _, r := range all {
		test, rest, _ := strings.Cut(r.test, "/")
		if r.dir != g.dir || !slices.Contains(g.tests, test) {
			continue
		}
		if !r.passed {
			return "", 0, fmt.Errorf("%s: %s failed: the page lists runs that passed", r.dir, r.test)
		}
		ended[test] = ended[test] || r.test == test
		if r.cases == 0 {
			continue
		}
		operation, name, nested := strings.Cut(strings.ReplaceAll(rest, "_", " "), "/")
		if len(g.tests) > 1 && nested {
			operation = strings.ToLower(strings.TrimPrefix(test, "Test")) + ": " + operation
		} else if len(g.tests) > 1 { // the subtests of the test are its steps
			operation, name = strings.ToLower(strings.TrimPrefix(test, "Test")), operation
		}
		fault := g.fault(name)
		if counts[operation] == nil {
			counts[operation] = map[string]int{}
		}
		counts[operation][fault] += r.cases
		faults[fault], tried[test] = true, true
		total += r.cases
	}
	for _, test := range g.tests {
		if !tried[test] || !ended[test] {
			return "", 0, fmt.Errorf("no result of %s in %s, or it hasn't ended: run it first", test, g.dir)
		}
	}
	return g.render(counts, slices.Sorted(maps.Keys(faults))), total, nil
}

func (g group) render(counts map[string]map[string]int, faults []string) string {
	var b strings.Builder
	names := make([]string, len(g.tests))
	for i, test := range g.tests {
		names[i] = fmt.Sprintf("`%s: %s`", g.dir, test)
	}
	fmt.Fprintf(&b, "### %s\n\n%s\n", g.title, wrap(strings.Join(names, ", ")+": "+g.holds))
	fmt.Fprintf(&b, "| operation | %s |\n|---|%s\n", strings.Join(faults, " | "), strings.Repeat("---:|", len(faults)))
	for _, operation := range slices.Sorted(maps.Keys(counts)) {
		fmt.Fprintf(&b, "| %s |", operation)
		for _, fault := range faults {
			n := counts[operation][fault]
			if n == 0 {
				b.WriteString(" |")
				continue
			}
			fmt.Fprintf(&b, " %d |", n)
		}
		b.WriteByte('\n')
	}
	return b.String()
}

// wrap breaks a paragraph into lines of at most 120 characters.
func wrap(text string) string {
	var b strings.Builder
	length := 0
	for i, word := range strings.Fields(text) {
		switch {
		case i == 0:
		case length+1+len(word) > 120:
			b.WriteByte('\n')
			length = 0
		default:
			b.WriteByte(' ')
			length++
		}
		b.WriteString(word)
		length += len(word)
	}
	return b.String() + "\n"
}
