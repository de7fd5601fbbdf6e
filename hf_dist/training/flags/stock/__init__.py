"""The flags of transformers' example scripts, in one place: what each is here.

The scripts are run_glue, run_classification, run_ner, run_qa, run_summarization, run_translation, run_clm
and run_mlm, with the TrainingArguments that each of them had.
"""
