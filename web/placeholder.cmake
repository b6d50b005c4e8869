# The page that says the dashboard was left out. SOURCE: this folder; OUT: where it goes. Empty .gz: only the plain form.
file(COPY ${SOURCE}/placeholder/ DESTINATION ${OUT})
file(COPY ${SOURCE}/src/favicon.svg DESTINATION ${OUT})
foreach(name index.html app.js app.css favicon.svg)
  file(WRITE ${OUT}/${name}.gz "")
endforeach()
