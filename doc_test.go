package egress

import (
	"go/ast"
	"go/parser"
	"go/token"
	"strings"
	"testing"
)

// undocumentedDefaults returns the fields of types in file whose comment ends in neither a default nor Required.
func undocumentedDefaults(t *testing.T, file string, types []string) []string {
	t.Helper()
	tree, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	var missing []string
	seen := 0
	for _, d := range tree.Decls {
		g, ok := d.(*ast.GenDecl)
		if !ok {
			continue
		}
		for _, spec := range g.Specs {
			s, ok := spec.(*ast.TypeSpec)
			if !ok {
				continue
			}
			fields, ok := s.Type.(*ast.StructType)
			wanted := false
			for _, name := range types {
				wanted = wanted || name == s.Name.Name
			}
			if !ok || !wanted {
				continue
			}
			seen++
			doc := ""
			for _, f := range fields.Fields.List {
				if f.Doc != nil {
					doc = f.Doc.Text()
				}
				if !strings.Contains(doc, "Default") && !strings.Contains(strings.ToLower(doc), "required") {
					missing = append(missing, s.Name.Name+"."+f.Names[0].Name)
				}
			}
		}
	}
	if seen != len(types) {
		t.Errorf("%s: found %d of %d types", file, seen, len(types))
	}
	return missing
}
