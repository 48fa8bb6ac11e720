package main

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
)

// writeChangelog lists the commits since the last tag before the release, by the
// package that each names.
func writeChangelog(ctx context.Context, s source, digest, file string) error {
	tags, err := git(ctx, s.root, "tag", "--merged", "HEAD", "--sort=-creatordate", "--list", "v*")
	if err != nil {
		return err
	}
	last := ""
	for tag := range strings.FieldsSeq(tags) {
		if tag != "v"+s.version {
			last = tag
			break
		}
	}
	commits, title := "HEAD", "All changes"
	if last != "" {
		commits, title = last+"..HEAD", "Changes since "+last
	}
	out, err := git(ctx, s.root, "log", "--no-merges", "--format=%s", commits)
	if err != nil {
		return err
	}
	var text bytes.Buffer
	fmt.Fprintf(&text, "# Tessera %s\n\n", s.version)
	fmt.Fprintf(&text, "Commit %s of %s.\nImage index `%s`.\n\n## %s\n", s.commit, s.time.Format("2006-01-02"), digest, title)
	text.WriteString(changes(out))
	if err := os.WriteFile(file, text.Bytes(), 0o644); err != nil {
		return fmt.Errorf("write the changelog: %w", err)
	}
	return nil
}

// changes groups subjects of commits, one a line, by the package before the
// colon; of several packages the first one counts, and the subject names them
// all. Groups are sorted, subjects without a package come last. Within a group
// the order stays.
func changes(subjects string) string {
	prefix := regexp.MustCompile(`^([a-z0-9][a-zA-Z0-9_./-]*)(, [a-zA-Z0-9_./-]+)*: (.+)$`)
	groups := map[string][]string{}
	for line := range strings.Lines(subjects) {
		group, subject := "", strings.TrimSpace(line)
		if m := prefix.FindStringSubmatch(subject); m != nil {
			group = m[1]
			if m[2] == "" {
				subject = m[3]
			}
		}
		if subject != "" {
			groups[group] = append(groups[group], subject)
		}
	}
	rest := groups[""]
	delete(groups, "")
	var text strings.Builder
	write := func(title string, subjects []string) {
		fmt.Fprintf(&text, "\n### %s\n\n", title)
		for _, subject := range subjects {
			fmt.Fprintf(&text, "- %s\n", subject)
		}
	}
	for _, group := range slices.Sorted(maps.Keys(groups)) {
		write(group, groups[group])
	}
	if len(rest) > 0 {
		write("Everything else", rest)
	}
	return text.String()
}
