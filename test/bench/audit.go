package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"strings"
)

// writes counts the API writes of the driver's own service accounts that the
// audit log holds, leases aside: leader election renews one every few seconds
// whatever the cluster does.
func writes(auditLog string) (int, error) {
	f, err := os.Open(auditLog)
	if err != nil {
		return 0, fmt.Errorf("count API writes: %w", err)
	}
	defer f.Close()
	n := 0
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		var e struct {
			Stage     string
			Verb      string
			User      struct{ Username string }
			ObjectRef struct{ Resource string }
		}
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			continue // the last line may be half written
		}
		if e.Stage == "ResponseComplete" && isWrite(e.Verb) && e.ObjectRef.Resource != "leases" &&
			strings.HasPrefix(e.User.Username, "system:serviceaccount:"+chartNamespace+":") {
			n++
		}
	}
	return n, lines.Err()
}

func isWrite(verb string) bool {
	switch verb {
	case "create", "update", "patch", "delete", "deletecollection":
		return true
	default:
		return false
	}
}
